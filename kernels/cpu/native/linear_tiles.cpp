#include "linear_tiles.hpp"

#include <algorithm>

namespace {

// At least. Groups unpack the weights each: at 64 rows that takes 3 % of a product on AVX2.
constexpr int64_t kGroupRows = 128;

}  // namespace

int64_t row_groups(const LinearArgs& args, int threads) {
    if (args.file) return 1;  // strips are read and released in one order
    const int64_t groups = std::min<int64_t>(args.m / kGroupRows, threads);
    return groups < 1 ? 1 : groups;
}

int64_t linear_items(const LinearArgs& args, int threads) {
    return strips_of(*args.w) * row_groups(args, threads);
}

void linear_tiles(const KernelTable& kernels, const LinearArgs& args, int threads,
                  const ItemRange& share, uint8_t* scratch) {
    const auto kernel = args.rounded        ? kernels.linear_bf16
                        : in_integers(args) ? kernels.linear_int
                                            : kernels.linear_float;
    const int64_t groups = row_groups(args, threads), strips = strips_of(*args.w);
    for (int64_t at = share.begin; at < share.end;) {
        const int64_t group = at / strips, first = group * strips, next = first + strips;
        const LinearArgs part = rows_of(args, args.m * group / groups, args.m * (group + 1) / groups);
        ItemRange own = share;
        own.begin = at - first;
        own.end = std::min<int64_t>(share.end, next) - first;
        own.reach = std::min<int64_t>(share.reach, next) - first;
        if (at != share.begin) own.resumed = 0;
        if (share.end > next) own.then = own.then_end = nullptr;
        kernel(&part, &own, scratch);
        at = next;
    }
}
