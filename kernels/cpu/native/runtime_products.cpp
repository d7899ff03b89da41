// How a run divides its products into tasks, and what the threads prefetch for the product after them.
#include <algorithm>

#include "linear_tiles.hpp"
#include "pack.hpp"
#include "runtime.hpp"

namespace {

// Of the weights of a task of a large product: 15 us at 35 GB/s.
constexpr int64_t kTaskBytes = 1 << 19;

}  // namespace

// Tasks of a product over `items` strips like those of `each`. A large one has one for every kTaskBytes: threads
// rarely read equally fast, and at the end of a product of an 8B one waited for a quarter of what the other had.
int64_t Runtime::product_tasks(const LinearArgs& each, int64_t items) const {
    const Weight& w = *each.w;
    const int64_t tasks = tasks_for(items, each.m * w.n * w.k / (in_integers(each) ? 4 : 1));
    if (tasks <= 1 || each.file) return tasks;  // parts of files are requested and released by large pieces
    const int64_t strip = w.dense ? kStripRows * w.k * (int64_t)element_size(w.scale_type) : code_bytes(w, 1);
    return std::max<int64_t>(tasks, std::min<int64_t>(items * strip / kTaskBytes, std::min<int64_t>(items, kMaxTasks)));
}

// Sets in `share` what memory the thread reads when it begins with these items of a stage of integer products.
void Runtime::hint(const Program& program, int stage, const ItemRange& items, ItemRange* share) const {
    const Program::Stage& next = program.stages_[(size_t)stage];
    int64_t before = 0;
    for (int i = next.first; i < next.last; ++i) {
        const LinearArgs& args = program.ops_[(size_t)program.parts_[(size_t)i].op].linear;
        if (row_groups(args, pool.threads()) > 1) return;  // items are not one stream of strips
        const int64_t end = before + strips_of(*args.w);
        if (items.begin < end) {
            share->then = args.w->codes + code_bytes(*args.w, items.begin - before);
            share->then_end = args.w->codes + code_bytes(*args.w, std::min<int64_t>(items.end, end) - before);
            return;
        }
        before = end;
    }
}

// The work items of an update's first product that are done with strips of the product before it.
ItemRange Runtime::down_units(const Program& program, int stage, const ItemRange& strips) const {
    const int64_t units = program.ops_[(size_t)program.stages_[(size_t)stage].down].low_rank.units;
    const int64_t total = phases_[(size_t)stage].total;
    const int64_t end = strips.end * units / total;
    return {strips.begin * units / total, end, end, 0};
}

// A share of a stage of several products: the strips of all of them, for each group of rows.
void Runtime::products(const Program& program, int stage, const ItemRange& share, int thread,
                       OperatorTimes::Laps* laps) {
    const Program::Stage& own = program.stages_[(size_t)stage];
    const int64_t groups = row_groups(program.ops_[(size_t)program.parts_[(size_t)own.first].op].linear, pool.threads());
    int64_t before = 0;
    for (int64_t group = 0; group < groups; ++group) {
        for (int i = own.first; i < own.last; ++i) {
            const int op = program.parts_[(size_t)i].op;
            const Op& product = program.ops_[(size_t)op];
            const int64_t strips = strips_of(*product.linear.w), end = before + strips, to = group * strips - before;
            if (share.begin < end && share.end > before) {
                ItemRange part = share;
                part.begin = std::max<int64_t>(share.begin, before) + to;
                part.end = std::min<int64_t>(share.end, end) + to;
                part.reach = std::min<int64_t>(share.reach, end) + to;
                part.resumed |= share.begin < before;
                if (share.reach > end) {
                    part.then = part.then_end = nullptr;
                    hint(program, stage, {end, share.reach, share.reach, 0}, &part);
                }
                tiles(product, Program::kTiles, part, thread);
                laps->lap(op, OperatorTimes::kTilePart);
            }
            before = end;
        }
    }
}
