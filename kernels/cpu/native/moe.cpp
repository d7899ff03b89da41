#include "moe.hpp"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "expert_cache.hpp"
#include "file_parts.hpp"
#include "rank_group.hpp"
#include "weight_check.hpp"

namespace {

// Inserts the values of one token, one after another, into the k best; of equal ones the first wins.
// `kept`: for every `size` values, whether they can be chosen; null: all can.
void choose(const float* values, int64_t count_of, int32_t k, int32_t* chosen, float* best,
            const bool* kept = nullptr, int64_t size = 1) {
    int32_t count = 0;
    for (int32_t e = 0; e < (int32_t)count_of; ++e) {
        if (kept && !kept[e / size]) continue;
        const float logit = values[e];
        if (count == k && !(logit > best[k - 1])) continue;
        int32_t at = count < k ? count++ : k - 1;
        for (; at > 0 && logit > best[at - 1]; --at) {
            best[at] = best[at - 1];
            chosen[at] = chosen[at - 1];
        }
        best[at] = logit;
        chosen[at] = e;
    }
}

// The scores of one token's experts.
void score(const RouteArgs& args, const float* logits, float* scores) {
    if (args.gate == kRouteSoftmax) {
        float peak = logits[0], total = 0.0f;
        for (int64_t e = 1; e < args.experts; ++e) peak = logits[e] > peak ? logits[e] : peak;
        for (int64_t e = 0; e < args.experts; ++e) total += scores[e] = expf(logits[e] - peak);
        for (int64_t e = 0; e < args.experts; ++e) scores[e] /= total;
    } else if (args.gate == kRouteSigmoid) {
        for (int64_t e = 0; e < args.experts; ++e) scores[e] = 1.0f / (1.0f + expf(-logits[e]));
    } else {
        for (int64_t e = 0; e < args.experts; ++e) {
            const float x = logits[e];  // above 20, log(1 + exp(x)) is x in float32
            scores[e] = sqrtf(x > 20.0f ? x : log1pf(expf(x)));
        }
    }
}

// Which groups of experts may be chosen from: those with the largest sums of their best values.
void keep_groups(const RouteArgs& args, const float* values, bool* kept) {
    float sums[kMaxScored], best[kMaxScored];
    int32_t at[kMaxScored];
    const int64_t size = args.experts / args.groups;
    for (int32_t g = 0; g < args.groups; ++g) {
        choose(values + g * size, size, args.group_best, at, best);
        sums[g] = 0.0f;
        for (int32_t j = 0; j < args.group_best; ++j) sums[g] += best[j];
        kept[g] = false;
    }
    choose(sums, args.groups, args.groups_used, at, best);
    for (int32_t j = 0; j < args.groups_used; ++j) kept[at[j]] = true;
}

// The weights of the sparse mixer: of expert j the softmax over those that it exceeds by little.
void weigh_sparsely(const RouteArgs& args, const float* logits, int32_t* chosen, float* weights) {
    bool left[kMaxScored];
    for (int64_t e = 0; e < args.experts; ++e) left[e] = true;
    choose(logits, args.experts, args.k, chosen, weights);
    for (int32_t j = 0; j < args.k; ++j) {
        const float own = logits[chosen[j]];
        float total = 0.0f;
        for (int64_t e = 0; e < args.experts; ++e) {
            const float size = fabsf(logits[e]), by = size > own ? size : own;
            if (left[e] && !((own - logits[e]) / by > args.reach)) total += expf(logits[e] - own);
        }
        weights[j] = 1.0f / total;
        left[chosen[j]] = false;
    }
}

void normalize(const RouteArgs& args, float* weights) {
    float total = 0.0f;
    for (int32_t j = 0; args.normalized && j < args.k; ++j) total += weights[j];
    total = total + args.epsilon > args.least ? total + args.epsilon : args.least;
    for (int32_t j = 0; j < args.k; ++j)
        weights[j] = (args.normalized ? weights[j] / total : weights[j]) * args.scale;
}

// The choice and the weights of one token where scores of all experts are needed.
void route_by_scores(const RouteArgs& args, const float* logits, int32_t* chosen, float* weights) {
    float scores[kMaxScored], values[kMaxScored];
    bool kept[kMaxScored];
    const bool grouped = args.groups > 1;
    score(args, logits, scores);
    // Without a bias logits are in the order of scores, which round more of them to one value.
    const float* order = args.bias || grouped ? scores : logits;
    for (int64_t e = 0; e < args.experts; ++e) values[e] = order[e] + (args.bias ? args.bias[e] : 0.0f);
    if (grouped) keep_groups(args, values, kept);
    choose(values, args.experts, args.k, chosen, weights, grouped ? kept : nullptr,
           args.experts / args.groups);
    for (int32_t j = 0; j < args.k; ++j) weights[j] = scores[chosen[j]];
    normalize(args, weights);
}

// A softmax over the chosen logits (normalized), or their part of the softmax over all.
void weigh_logits(const RouteArgs& args, const float* logits, const int32_t* chosen, float* weights) {
    float peak = logits[chosen[0]], total = 0.0f;
    for (int32_t j = 1; j < args.k; ++j) peak = logits[chosen[j]] > peak ? logits[chosen[j]] : peak;
    for (int64_t e = 0; !args.normalized && e < args.experts; ++e) total += expf(logits[e] - peak);
    for (int32_t j = 0; j < args.k; ++j) {
        weights[j] = expf(logits[chosen[j]] - peak);
        if (args.normalized) total += weights[j];
    }
    for (int32_t j = 0; j < args.k; ++j) weights[j] = weights[j] / total * args.scale;
}

// Rows of the expert's activations, contiguous as fp32 products need them.
const float* gathered(const ExpertsArgs& args, int64_t first, int64_t rows, float* to) {
    const int64_t k = args.each.w->k;
    if (args.each.act.values) return args.each.act.values + first * k;
    if (!args.each.source) return args.each.x + first * k;
    for (int64_t m = 0; m < rows; ++m)
        memcpy(to + m * k, args.each.x + args.each.source[first + m] * k, sizeof(float) * (size_t)k);
    return to;
}

// Some strips of one expert, whose rows are first..end of all rows.
void one_expert(const KernelTable& kernels, const ExpertsArgs& args, const Weight* w, int64_t first,
                int64_t end, const ItemRange& strips, uint8_t* scratch) {
    LinearArgs one = args.each;
    one.w = w;
    if (in_integers(one)) {
        const LinearArgs part = rows_of(one, first, end);
        kernels.linear_int(&part, &strips, scratch);
        return;
    }
    one.out += first * one.out_stride;
    const int64_t pass = float_rows_per_pass(end - first, w->k);
    float* const x = (float*)(scratch + linear_private_bytes(*w, pass, true));
    for (int64_t m = first; m < end; m += pass) {
        one.m = std::min<int64_t>(pass, end - m);
        one.x = gathered(args, m, one.m, x);
        one.act.values = nullptr;
        kernels.linear_float(&one, &strips, scratch);
        one.out += one.m * one.out_stride;
    }
}

// Counts row i, and names the rank that computes it. Its expert's number here; -1: at another rank.
int32_t serve(const GroupArgs& args, int64_t i) {
    const int32_t expert = args.chosen[i];
    const int32_t* ranks = args.ranks + args.first[expert];
    const int64_t copies = args.first[expert + 1] - args.first[expert];
    args.servers[i] = ranks[args.load[expert]++ % copies];
    return args.servers[i] == args.rank ? args.local[expert] : -1;
}

template <typename Args>
float* area_of(const Args& args, int rank) {
    return reinterpret_cast<float*>(args.group->area(rank, (uint32_t)args.number));
}

// The weighted sums of the tokens begin..end; `row_of(t * k + j)` is token t's j-th row.
template <typename RowOf>
void weighted_sums(const CombineArgs& args, int64_t begin, int64_t end, const RowOf& row_of) {
    for (int64_t t = begin; t < end; ++t) {
        float* out = args.out + t * args.width;
        for (int32_t j = 0; j < args.k; ++j) {
            const float weight = args.weights[t * args.k + j];
            const float* x = row_of(t * args.k + j);
            if (j == 0)
                for (int64_t i = 0; i < args.width; ++i) out[i] = weight * x[i];
            else
                for (int64_t i = 0; i < args.width; ++i) out[i] += weight * x[i];
        }
        if (!args.shared) continue;
        const float* shared = args.shared + t * args.width;
        // A sigmoid in double, so that Python's sum over ranks has the same bits. exp() would need
        // glibc 2.29; wheels run from 2.28 on.
        const float part = args.gate ? (float)(1.0 / (2.0 + expm1(-(double)args.gate[t]))) : 1.0f;
        for (int64_t i = 0; i < args.width; ++i) out[i] += part * shared[i];
    }
}

// The choice and the weights of one token.
void route_token(const RouteArgs& args, const float* logits, int32_t* chosen, float* weights) {
    if (args.gate == kRouteSparse) {
        weigh_sparsely(args, logits, chosen, weights);
        normalize(args, weights);
        return;
    }
    const bool softmax = args.gate == kRouteSoftmax && !args.bias && args.groups == 1;
    if (!softmax || (args.normalized && (args.epsilon > 0.0f || args.least > 0.0f))) {
        route_by_scores(args, logits, chosen, weights);
        return;
    }
    choose(logits, args.experts, args.k, chosen, weights);
    weigh_logits(args, logits, chosen, weights);
}

}  // namespace

void route(const RouteArgs& args, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
        float* weights = args.weights + t * args.k;
        int32_t* chosen = args.chosen + t * args.k;
        route_token(args, args.logits + t * args.experts, chosen, weights);
        for (int32_t j = 0; args.factors && j < args.k; ++j) weights[j] *= args.factors[chosen[j]];
    }
}

void group_rows(const GroupArgs& args) {
    memset(args.starts, 0, sizeof(int32_t) * (size_t)(args.count + 1));
    for (int64_t i = 0; i < args.rows; ++i) {
        args.places[i] = args.first ? serve(args, i) : args.chosen[i];
        if (args.places[i] >= 0) ++args.starts[args.places[i] + 1];
    }
    int32_t used = 0;
    for (int64_t e = 0; e < args.count; ++e) {
        if (args.starts[e + 1]) args.active[used++] = (int32_t)e;
        args.starts[e + 1] += args.starts[e];
    }
    args.active[args.count] = used;
    for (int64_t i = 0; i < args.rows; ++i) {  // starts[e] advances to the start of expert e + 1
        const int32_t expert = args.places[i];
        if (expert < 0) continue;
        const int32_t place = args.starts[expert]++;
        args.places[i] = place;
        args.tokens[place] = (int32_t)(i / args.k);
        args.owners[place] = expert;
    }
    memmove(args.starts + 1, args.starts, sizeof(int32_t) * (size_t)args.count);
    args.starts[0] = 0;
}

void add_biases(const BiasArgs& args, int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
        float* x = args.x + m * args.width;
        const float* bias = args.bias + args.owners[m] * args.width;
        for (int64_t i = 0; i < args.width; ++i) x[i] += bias[i];
    }
}

void combine(const CombineArgs& args, int64_t begin, int64_t end) {
    weighted_sums(args, begin, end,
                  [&](int64_t row) { return args.x + args.places[row] * args.width; });
}

void send_expert_rows(const CombineRanksArgs& args, int64_t begin, int64_t end) {
    const CombineArgs& own = args.own;
    float* to = area_of(args, args.group->rank());
    for (int64_t row = begin * own.k; row < end * own.k; ++row)
        if (own.places[row] >= 0)
            memcpy(to + row * own.width, own.x + own.places[row] * own.width,
                   sizeof(float) * (size_t)own.width);
}

void combine_ranks(const CombineRanksArgs& args, int64_t begin, int64_t end) {
    if (!args.group->wait((uint32_t)args.number)) return;
    CombineArgs own = args.own;
    if (args.starts) {
        const int32_t* tokens = args.starts + args.group->rank();
        begin = std::max<int64_t>(begin, tokens[0]);
        end = std::min<int64_t>(end, tokens[1]);
        if (begin >= end) return;  // without tokens of its own a rank has no memory for results
        own.out -= tokens[0] * own.width;
        if (own.shared) own.shared -= tokens[0] * own.width;
        if (own.gate) own.gate -= tokens[0];
    }
    weighted_sums(own, begin, end, [&](int64_t row) {
        return area_of(args, args.servers[row]) + row * own.width;
    });
}

void send_token_rows(const GatherRanksArgs& args, int64_t begin, int64_t end) {
    const int32_t* own = args.starts + args.group->rank();
    const int64_t first = std::max<int64_t>(begin, own[0]) - own[0], last = std::min<int64_t>(end, own[1]) - own[0];
    if (first < last)
        memcpy(area_of(args, args.group->rank()) + first * args.width, args.x + first * args.width,
               sizeof(float) * (size_t)((last - first) * args.width));
}

void gather_ranks(const GatherRanksArgs& args, int64_t begin, int64_t end) {
    if (!args.group->wait((uint32_t)args.number)) return;
    for (int rank = 0; rank < args.group->size(); ++rank) {
        const int64_t start = args.starts[rank];
        const int64_t first = std::max<int64_t>(begin, start), last = std::min<int64_t>(end, args.starts[rank + 1]);
        if (first < last)
            memcpy(args.out + first * args.width, area_of(args, rank) + (first - start) * args.width,
                   sizeof(float) * (size_t)((last - first) * args.width));
    }
}

void quantize_expert_rows(const KernelTable& kernels, const ExpertsArgs& args, int64_t begin,
                          int64_t end) {
    LinearArgs one = args.each;
    for (int32_t i = 0; i < args.active[args.count]; ++i) {
        const int32_t expert = args.active[i];
        const int64_t first = args.starts[expert], last = args.starts[expert + 1];
        if (first >= end || last <= begin) continue;
        one.w = args.experts[expert];
        kernels.quantize(&one, first < begin ? begin : first, std::min<int64_t>(last, end));
    }
}

size_t expert_private_bytes(const ExpertsArgs& args) {
    const Weight& w = *args.each.w;
    const int64_t most = args.each.m / args.k;
    const size_t bytes = linear_private_bytes(w, most, args.each.exact != 0);
    if (in_integers(args.each)) return bytes;
    return bytes + sizeof(float) * (size_t)(float_rows_per_pass(most, w.k) * w.k);
}

Status expert_tiles(const KernelTable& kernels, const ExpertsArgs& args, const ItemRange& share,
                    uint8_t* scratch) {
    const int64_t strips = strips_of(*args.each.w);
    const int64_t used = args.active[args.count] * strips;
    const int64_t end = std::min<int64_t>(share.end, used), reach = std::min<int64_t>(share.reach, used);
    bool resumed = share.resumed != 0;
    for (int64_t at = share.begin; at < end;) {
        const int64_t first = at / strips * strips, next = first + strips;
        const int32_t* expert = args.active + at / strips;
        const int64_t last = std::min<int64_t>(end, next), until = std::min<int64_t>(reach, next);
        ItemRange own = {at - first, last - first, until - first, resumed};
        if (reach > next && !args.cache) {  // this thread continues with another expert
            const Weight& after = *args.experts[expert[1]];
            own.then = after.codes;
            own.then_end = after.codes + code_bytes(after, std::min<int64_t>(reach - next, strips));
        } else if (reach <= next) {
            own.then = share.then;
            own.then_end = share.then_end;
        }
        const Weight* w = args.experts[*expert];
        if (args.cache && !(w = args.cache->acquire(args.group, *expert))) {
            const Status found = args.cache->status();
            return found ? found : kClosed;
        }
        if (!is_right(*w)) return kDamaged;
        one_expert(kernels, args, w, args.starts[*expert], args.starts[*expert + 1], own, scratch);
        if (!is_right(*w)) return kDamaged;  // still: see read_over
        if (args.cache) args.cache->release(args.group, *expert, own.end - own.begin);
        release_strips(args.each.file, *w, own.begin, own.end);
        resumed = true;
        at = next;
    }
    return kOk;
}
