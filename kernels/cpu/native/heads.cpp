#include "heads.hpp"

#include <string.h>

#include <algorithm>

#include "file_parts.hpp"

namespace {

int64_t tokens_of(const HeadsArgs& args) { return args.each.m / args.count; }

const float* row_of(const HeadsArgs& args, int64_t token, int64_t head) {
    return args.each.x + token * args.x_token + head * args.x_head;
}

// Some strips of one head.
void one_head(const KernelTable& kernels, const HeadsArgs& args, int64_t head, const ItemRange& strips,
              uint8_t* scratch) {
    const int64_t tokens = tokens_of(args), first = head * tokens;
    LinearArgs one = args.each;
    one.w = args.heads[head];
    if (in_integers(one)) {
        LinearArgs part = rows_of(one, first, first + tokens);
        part.out = args.each.out + head * args.out_head;
        kernels.linear_int(&part, &strips, scratch);
        return;
    }
    const int64_t k = one.w->k, pass = float_rows_per_pass(tokens, k);
    float* const x = (float*)(scratch + linear_private_bytes(*one.w, pass, true));
    one.act.values = nullptr;
    for (int64_t t = 0; t < tokens; t += pass) {
        one.m = std::min<int64_t>(pass, tokens - t);
        one.out = args.each.out + head * args.out_head + t * one.out_stride;
        one.x = args.each.act.values ? args.each.act.values + (first + t) * k : x;
        for (int64_t i = 0; i < one.m && one.x == x; ++i)
            memcpy(x + i * k, row_of(args, t + i, head), sizeof(float) * (size_t)k);
        kernels.linear_float(&one, &strips, scratch);
    }
}

}  // namespace

void quantize_head_rows(const KernelTable& kernels, const HeadsArgs& args, int64_t begin, int64_t end) {
    const int64_t tokens = tokens_of(args);
    for (int64_t row = begin; row < end; ++row) {
        const int64_t token = row / args.count, head = row % args.count, place = head * tokens + token;
        LinearArgs one = rows_of(args.each, place, place + 1);
        one.w = args.heads[head];
        one.x = row_of(args, token, head);
        kernels.quantize(&one, 0, 1);
    }
}

size_t head_private_bytes(const HeadsArgs& args) {
    const Weight& w = *args.each.w;
    const size_t bytes = linear_private_bytes(w, tokens_of(args), args.each.exact != 0);
    if (in_integers(args.each)) return bytes;
    return bytes + sizeof(float) * (size_t)(float_rows_per_pass(tokens_of(args), w.k) * w.k);
}

void head_tiles(const KernelTable& kernels, const HeadsArgs& args, const ItemRange& share, uint8_t* scratch) {
    const int64_t strips = strips_of(*args.each.w);
    bool resumed = share.resumed != 0;
    for (int64_t at = share.begin; at < share.end;) {
        const int64_t head = at / strips, first = head * strips, next = first + strips;
        const int64_t last = std::min<int64_t>(share.end, next), reach = std::min<int64_t>(share.reach, next);
        ItemRange own = {at - first, last - first, reach - first, resumed};
        own.then = share.then;
        own.then_end = share.then_end;
        if (share.reach > next) {  // this thread continues with another head
            const Weight& after = *args.heads[head + 1];
            own.then = after.codes;
            own.then_end = after.codes + code_bytes(after, std::min<int64_t>(share.reach - next, strips));
        }
        one_head(kernels, args, head, own, scratch);
        release_strips(args.each.file, *args.heads[head], own.begin, own.end);
        resumed = true;
        at = next;
    }
}
