#include "runtime.hpp"

#include <string.h>

#include "attention_plan.hpp"
#include "expert_cache.hpp"
#include "file_parts.hpp"
#include "heads.hpp"
#include "linear_tiles.hpp"
#include "masks.hpp"
#include "moe.hpp"
#include "pack.hpp"
#include "rank_group.hpp"
#include "row_copies.hpp"
#include "state_plan.hpp"
#include "system.hpp"
#include "weight_check.hpp"

namespace {

// Tasks per thread and phase: enough that a thread that loses its core delays the others little.
constexpr int64_t kTasksPerThread = 4;
// Work (about 1 per multiplication in registers, 8 per exponential) below which a second thread costs
// more than it saves, and the least work of a task: about 3 and 1.5 us.
constexpr int64_t kWorthSharing = 16384;
constexpr int64_t kMinTaskWork = 8192;
constexpr int64_t kItemTaskWork = 262144;  // of a task of attention, about 10 us

// Work of one row of a row-wise part.
int64_t row_work(const Op& op) {
    switch (op.kind) {
        case kOpEmbedding: return 4 * (op.embedding.row_bytes ? 16 * op.embedding.width : op.embedding.w->k);
        case kOpLinear: return 2 * op.linear.w->k;
        case kOpNorm: return 2 * op.norm.width;
        case kOpActivation: return 8 * op.activation.width;
        case kOpMap: return op.map.kind == kMapSoftcap ? 8 * op.map.width : op.map.width;
        case kOpAngles: return 64 * op.angles.half;
        case kOpPlaceRows: return op.place_rows.width;
        case kOpGate: return (op.gate.width + 8) * op.gate.gates;
        case kOpRates: return 16 * op.rates.width;
        case kOpGatedNorm: return 12 * op.gated_norm.width;
        case kOpSelect: return op.select.width;
        case kOpTake: return 2 * op.take.width;
        case kOpRoute: return 8 * op.route.experts;
        case kOpExperts: return 2 * op.experts.each.w->k;
        case kOpHeads: return 2 * op.heads.each.w->k;
        case kOpBias: return op.bias.width;
        case kOpCombine: return op.combine.width * (op.combine.k + (op.combine.shared != nullptr));
        case kOpCombineRanks: return op.combine_ranks.own.width * op.combine_ranks.own.k;
        case kOpGatherRanks: return op.gather_ranks.width;
        // keys are transposed in their pages: every number is a separate store
        case kOpRecode: return 16 * (int64_t)op.recode.head_dim;
        case kOpExchange: return op.exchange.width * op.exchange.group->size();
        case kOpRope: return 4 * (op.rope.heads + 2 * op.rope.kv_heads) * (int64_t)op.rope.head_dim;
        default: return 0;
    }
}

// Where the rows begin..end stop to have values: see ActivationArgs::used.
int64_t used_end(const int32_t* used, int64_t begin, int64_t end) {
    if (!used || *used >= end) return end;
    return *used > begin ? *used : begin;
}

// False if a request's tokens or pages are outside of their tensors.
bool find_places(const PlacesArgs& a, int64_t requests) {
    if (requests && a.query_start[0] < 0) return false;
    for (int64_t r = 0; r < requests; ++r) {
        const int32_t* pages = a.page_table + r * a.table_width;
        const int64_t begin = a.query_start[r], end = a.query_start[r + 1];
        int64_t position = a.context_len[r] - (end - begin);
        if (end < begin || end > a.tokens || position < 0 ||
            a.context_len[r] > a.table_width * a.page_size)
            return false;
        for (int64_t t = begin; t < end; ++t, ++position) {
            a.positions[t] = position;
            a.slots[t] = (int64_t)pages[position / a.page_size] * a.page_size +
                         position % a.page_size;
        }
    }
    return true;
}

// Ids of either width; a negative id converts to more than any limit.
template <typename Id>
bool in_range(const Id* ids, int64_t count, int64_t limit) {
    bool fits = true;
    for (int64_t i = 0; i < count; ++i) fits &= (uint64_t)ids[i] < (uint64_t)limit;
    return fits;
}

// -1 stands for none.
bool in_range_or_none(const int32_t* index, int64_t count, int64_t limit) {
    bool fits = true;
    for (int64_t i = 0; i < count; ++i) fits &= index[i] >= -1 && index[i] < limit;
    return fits;
}

// The same requests over the same pages: the checks and the plan of the previous layer hold.
bool same_plan(const AttentionArgs& a, const AttentionArgs& b) {
    return a.query_start == b.query_start && a.context_len == b.context_len &&
           a.page_table == b.page_table && a.table_width == b.table_width &&
           a.num_pages == b.num_pages && a.tokens == b.tokens && a.window == b.window &&
           a.heads == b.heads && a.kv_heads == b.kv_heads && a.head_dim == b.head_dim &&
           a.value_dim == b.value_dim && a.latent == b.latent && a.page_size == b.page_size &&
           a.num_levels == b.num_levels && a.both_ways == b.both_ways && a.chunked == b.chunked &&
           a.ahead == b.ahead && a.rounded == b.rounded;
}

void at_least(size_t* bytes, size_t needed) { *bytes = needed > *bytes ? needed : *bytes; }

}  // namespace

void Scratch::release() {
    free_aligned(data_);
    data_ = nullptr;
    size_ = 0;
}

bool Scratch::reserve(size_t bytes, bool zeroed) {
    if (bytes <= size_) return true;
    free_aligned(data_);
    data_ = static_cast<uint8_t*>(aligned_memory(aligned(bytes)));
    size_ = data_ ? bytes : 0;
    if (data_ && zeroed) memset(data_, 0, bytes);
    return data_ != nullptr;
}

bool Runtime::reserve_private(size_t bytes) {
    stride_ = aligned(bytes);
    return private_.reserve(stride_ * (size_t)pool.threads());
}

int64_t Runtime::tasks_for(int64_t total, int64_t work) const {
    if (work < kWorthSharing) return 1;
    int64_t tasks = kTasksPerThread * pool.threads();
    if (tasks > work / kMinTaskWork) tasks = work / kMinTaskWork;
    const int64_t most = total < kMaxTasks ? total : (int64_t)kMaxTasks;
    return tasks < most ? tasks : most;
}

struct Runtime::Frame {
    Runtime* runtime;
    Program* program;
};

// What the operators of one run need, and what was checked already: an index tensor that several
// operators share is checked once.
struct Runtime::Needs {
    size_t activations = 0, attention = 0, each_thread = 0;
    AttentionPlan plan = {};
    const AttentionArgs* planned = nullptr;
    const RopeArgs* written = nullptr;
    const StateRows* walked = nullptr;
    size_t low = 0;
    int64_t exchanged = 0;  // the most bytes of a rank
};

// Divides attention into items; layers over the same requests share one plan.
Status Runtime::plan_items(Op* op, int64_t requests, Needs* needs) {
    AttentionArgs& args = op->attention;
    if (needs->planned && same_plan(*needs->planned, args)) {
        args.requests = needs->planned->requests;
        args.query_tile = needs->planned->query_tile;
        args.split_blocks = needs->planned->split_blocks;
        args.looks_ahead = needs->planned->looks_ahead;
    } else {
        needs->plan = plan_attention(&args, (int)requests, pool.threads());
        if (needs->plan.status != kOk) return (Status)needs->plan.status;
        needs->planned = &args;
        at_least(&needs->each_thread, needs->plan.private_bytes);
        at_least(&needs->attention, needs->plan.shared_bytes);
    }
    op->items = needs->plan.items;
    op->work = needs->plan.work;
    return kOk;
}

// Divides an operator with states into items. All layers of a step have the same rows, but for the memory.
Status Runtime::plan_states(Op* op, StateRows* rows, int64_t requests, Needs* needs) {
    const StateRows* last = needs->walked;
    const bool checked = last && last->query_start == rows->query_start && last->initial == rows->initial &&
                         last->save_start == rows->save_start && last->save_token == rows->save_token &&
                         last->save_slot == rows->save_slot && last->slots == rows->slots &&
                         last->tokens == rows->tokens && last->saves == rows->saves &&
                         last->requests == requests;
    rows->requests = requests;
    if (!checked && !states_in_range(*rows, requests)) return kBadIndex;
    needs->walked = rows;
    const StatePlan plan = op->kind == kOpConv    ? plan_conv(&op->conv)
                           : op->kind == kOpDelta ? plan_delta(&op->delta, pool.threads())
                                                  : plan_space(&op->space, pool.threads());
    op->items = plan.items;
    op->work = plan.work;
    at_least(&needs->each_thread, plan.private_bytes);
    return kOk;
}

// Records the order in which parts of a file are used: the next step then knows which part comes next.
void Runtime::note_file_part(LinearArgs* args) {
    args->done = nullptr;
    if (!args->file) return;
    if (used_ && used_ != args->file) {
        used_->next = args->file;
        args->done = used_;
    }
    used_ = args->file;
}

// Sets the fields of an operator that depend on the run and checks that its indices are in range.
Status Runtime::bind(Op* op, int64_t n, Needs* needs) {
    bool fits = true;
    switch (op->kind) {
        case kOpLinear: {
            LinearArgs& args = op->linear;
            args.m = n;
            note_file_part(&args);
            at_least(&needs->each_thread, args.rounded ? bf16_private_bytes(*args.w, args.m)
                                                       : linear_private_bytes(*args.w, args.m, args.exact != 0));
            if (quantizes(args)) at_least(&needs->activations, activation_bytes(args, kernels->wide_in_words));
            break;
        }
        case kOpExperts: {
            LinearArgs& each = op->experts.each;
            each.m = n;
            note_file_part(&each);
            at_least(&needs->each_thread, expert_private_bytes(op->experts));
            if (quantizes(each)) at_least(&needs->activations, activation_bytes(each, kernels->wide_in_words));
            break;
        }
        case kOpHeads: {
            LinearArgs& each = op->heads.each;
            each.m = n;
            note_file_part(&each);
            at_least(&needs->each_thread, head_private_bytes(op->heads));
            if (quantizes(each)) at_least(&needs->activations, activation_bytes(each, kernels->wide_in_words));
            break;
        }
        case kOpGroup: op->group.rows = n; break;
        case kOpFetch:
            op->fetch.rows = n;
            fits = !op->fetch.chosen || n % op->fetch.k == 0;
            break;
        case kOpTransfer: op->transfer.rows = n; break;
        case kOpAttention: return plan_items(op, n, needs);
        case kOpConv: return plan_states(op, &op->conv.rows, n, needs);
        case kOpDelta: return plan_states(op, &op->delta.rows, n, needs);
        case kOpSpace: return plan_states(op, &op->space.rows, n, needs);
        case kOpPlaces: fits = find_places(op->places, n); break;
        case kOpEmbedding:
            release_part(op->embedding.file);  // the rows of the last step
            fits = in_range(op->embedding.ids, n,
                            op->embedding.whole ? op->embedding.whole : op->embedding.w->n);
            break;
        case kOpSelect: fits = in_range(op->select.rows, n, op->select.size); break;
        case kOpPlaceRows: fits = in_range_or_none(op->place_rows.index, n, op->place_rows.size); break;
        case kOpTake: fits = in_range(op->take.order, op->take.width, op->take.width); break;
        case kOpRope: {
            const RopeArgs* last = needs->written;
            const bool checked = last && last->slots == op->rope.slots &&
                                 last->num_pages == op->rope.num_pages &&
                                 last->page_size == op->rope.page_size;
            fits = checked || slots_in_range(&op->rope, n);
            needs->written = &op->rope;
            break;
        }
        case kOpLowRank:
            fits = slots_.assign(&op->low_rank, n) && (!op->low_rank.ids ||
                   in_range(op->low_rank.ids, n, op->low_rank.k));
            at_least(&needs->low, low_bytes(op->low_rank));
            op->low_rank.units = down_items(op->low_rank).count;
            at_least(&needs->each_thread, low_scratch(op->low_rank));
            break;
        case kOpExchange: {
            const int64_t bytes = n * op->exchange.width * (int64_t)sizeof(float);
            needs->exchanged = bytes > needs->exchanged ? bytes : needs->exchanged;
            group_ = op->exchange.group;
            break;
        }
        case kOpCombineRanks: {
            const CombineArgs& own = op->combine_ranks.own;
            const int64_t bytes = n * own.k * own.width * (int64_t)sizeof(float);
            needs->exchanged = bytes > needs->exchanged ? bytes : needs->exchanged;
            group_ = op->combine_ranks.group;
            break;
        }
        case kOpGatherRanks: {
            // A rank's part is smaller, but all must reserve the same.
            const int64_t bytes = n * op->gather_ranks.width * (int64_t)sizeof(float);
            needs->exchanged = bytes > needs->exchanged ? bytes : needs->exchanged;
            group_ = op->gather_ranks.group;
            break;
        }
        case kOpSample:
            at_least(&needs->each_thread, (size_t)kernels->sample_scratch(op->sample.width));
            break;
        default: break;
    }
    return fits ? kOk : kBadIndex;
}

// Items and tasks of a stage that runs the tiles of one operator.
Phase Runtime::tile_phase(const Op& op, Program::Work kind, int64_t count) const {
    if (op.kind == kOpLowRank) {
        const bool up = kind == Program::kMoreTiles;
        const LowRankItems items = up ? up_items(op.low_rank) : down_items(op.low_rank);
        return {items.count, tasks_for(items.count, items.work)};
    }
    if (op.kind == kOpAttention || with_states(op.kind)) {
        // Items of a task prefetch for one another; large items get a task each.
        const int64_t least = kTasksPerThread * pool.threads(), fine = op.work / kItemTaskWork;
        const int64_t wanted = fine > least ? fine : least;
        const int64_t most = op.items < kMaxTasks ? op.items : (int64_t)kMaxTasks;
        return {op.items, op.work < kWorthSharing || most < 1 ? 1 : wanted < most ? wanted : most};
    }
    if (op.kind == kOpSample) return {count, tasks_for(count, count * op.sample.width)};
    if (op.kind == kOpGroup || op.kind == kOpFetch || op.kind == kOpTransfer) return {1, 1};
    if (op.kind == kOpExperts) {
        const int64_t strips = expert_strips(op.experts);
        return {strips, product_tasks(op.experts.each, strips)};
    }
    if (op.kind == kOpHeads) {
        const int64_t strips = head_strips(op.heads);
        return {strips, product_tasks(op.heads.each, strips)};
    }
    const int64_t items = linear_items(op.linear, pool.threads());
    return {items, product_tasks(op.linear, items)};
}

// Items and tasks of a stage that runs tiles: those of all its products.
Phase Runtime::stage_phase(const Program& program, const Program::Stage& stage, int64_t count) const {
    Phase phase = {0, 1};
    for (int i = stage.first; i < stage.last; ++i) {
        const Phase one = tile_phase(program.ops_[(size_t)program.parts_[(size_t)i].op], stage.work, count);
        phase.total += one.total;
        phase.tasks += one.tasks - 1;
    }
    if (phase.tasks > kMaxTasks) phase.tasks = kMaxTasks;
    return phase;
}

// Everything that depends on the counts of a run: fields of operators, scratch memory, phases.
Status Runtime::prepare(Program& program, const int64_t* counts) {
    Needs needs;
    group_ = nullptr;
    transferred_ = kOk;
    slots_.clear();
    for (Op& op : program.ops_) {
        const Status status = bind(&op, counts[op.count] * op.per, &needs);
        if (status != kOk) return status;
    }
    if (!activations_.reserve(needs.activations) || !attention_.reserve(needs.attention, true) ||
        !reserve_private(needs.each_thread) || !low_.reserve(needs.low))
        return kOutOfMemory;
    if (group_) {
        const Status status = group_->reserve(needs.exchanged);
        if (status != kOk) return status;
    }
    for (Op& op : program.ops_) {
        // Without rows nothing is exchanged; a number that nobody counts would break the order of areas.
        if (op.kind == kOpExchange && counts[op.count] * op.per)
            op.exchange.number = group_->next();
        if (op.kind == kOpCombineRanks && counts[op.count] * op.per)
            op.combine_ranks.number = group_->next();
        if (op.kind == kOpGatherRanks && counts[op.count] * op.per)
            op.gather_ranks.number = group_->next();
        if (op.kind == kOpAttention) op.attention.shared = attention_.data();
        if (op.kind == kOpLowRank) op.low_rank.low = (float*)low_.data();
        if (quantizes(op)) place_activations(&op.linear, activations_.data(), kernels->wide_in_words);
        if (op.kind == kOpExperts && quantizes(op.experts.each))
            place_activations(&op.experts.each, activations_.data(), kernels->wide_in_words);
        if (op.kind == kOpHeads && quantizes(op.heads.each))
            place_activations(&op.heads.each, activations_.data(), kernels->wide_in_words);
    }
    phases_.clear();
    for (const Program::Stage& stage : program.stages_) {
        const int64_t count = counts[stage.count];
        if (stage.work != Program::kRows) {
            phases_.push_back(stage_phase(program, stage, count));
            continue;
        }
        int64_t work = 0;
        for (int i = stage.first; i < stage.last; ++i) {
            const Op& op = program.ops_[(size_t)program.parts_[(size_t)i].op];
            work += count * op.per * row_work(op);
        }
        phases_.push_back({count, tasks_for(count, work)});
    }
    return kOk;
}

// Rows begin..end of a row-wise part.
void Runtime::rows(const Op& op, Program::Work kind, int64_t begin, int64_t end) {
    switch (op.kind) {
        case kOpEmbedding:
            if (usable(*op.embedding.w)) gather_rows(op.embedding, begin, end);
            break;
        case kOpLinear: kernels->quantize(&op.linear, begin, end); break;
        case kOpNorm: kernels->norm(&op.norm, begin, end); break;
        case kOpActivation: kernels->activation(&op.activation, begin, used_end(op.activation.used, begin, end)); break;
        case kOpMap: kernels->map(&op.map, begin, end); break;
        case kOpAngles: kernels->rope_angles(&op.angles, begin, end); break;
        case kOpGate: kernels->gate(&op.gate, begin, end); break;
        case kOpRates: kernels->rates(&op.rates, begin, end); break;
        case kOpGatedNorm: kernels->gated_norm(&op.gated_norm, begin, end); break;
        case kOpSelect: select_rows(op.select, begin, end); break;
        case kOpPlaceRows: place_rows(op.place_rows, begin, end); break;
        case kOpTake: take_columns(op.take, begin, end); break;
        case kOpRoute: route(op.route, begin, end); break;
        case kOpExperts: quantize_expert_rows(*kernels, op.experts, begin, end); break;
        case kOpHeads: quantize_head_rows(*kernels, op.heads, begin, end); break;
        case kOpBias: add_biases(op.bias, begin, used_end(op.bias.used, begin, end)); break;
        case kOpCombine: combine(op.combine, begin, end); break;
        case kOpRope: kernels->rope(&op.rope, begin, end); break;
        case kOpRecode: kernels->recode(&op.recode, begin, end); break;
        case kOpExchange:
            if (kind == Program::kRows) send_rows(op.exchange, begin, end);
            else receive_rows(op.exchange, begin, end);
            break;
        case kOpCombineRanks:
            if (kind == Program::kRows) send_expert_rows(op.combine_ranks, begin, end);
            else combine_ranks(op.combine_ranks, begin, end);
            break;
        case kOpGatherRanks:
            if (kind == Program::kRows) send_token_rows(op.gather_ranks, begin, end);
            else gather_ranks(op.gather_ranks, begin, end);
            break;
        default: break;
    }
}

// Once a rank is lost, what this one computes is wrong: nobody may get it.
void Runtime::transfer(const TransferArgs& args) {
    if (transferred_ == kOk && group_ && group_->broken()) transferred_ = kRankLost;
    if (transferred_ == kOk && args.rows)
        transferred_ = args.link->transfer(args.x, args.rows * args.width * (int64_t)sizeof(float));
    if (transferred_ == kOk) return;
    args.link->give_up();
    if (group_) group_->give_up();
}

// Whether a weight is what was written. If not, the run has no result.
bool Runtime::usable(const Weight& w) {
    if (is_right(w)) return true;
    unusable_ = kDamaged;
    return false;
}

void Runtime::tiles(const Op& op, Program::Work kind, const ItemRange& share, int thread) {
    uint8_t* scratch = private_scratch(thread);
    switch (op.kind) {
        case kOpLinear: {
            const LinearArgs& args = op.linear;
            stream_file_parts(args, share, strips_of(*args.w));
            if (!usable(*args.w)) break;
            linear_tiles(*kernels, args, pool.threads(), share, scratch);
            usable(*args.w);  // still: see read_over
            release_strips(args.file, *args.w, share.begin, share.end);
            break;
        }
        case kOpAttention: {
            const auto kernel = op.attention.rounded ? kernels->attention_bf16 : kernels->attention;
            kernel(&op.attention, &share, scratch);
            break;
        }
        case kOpConv: kernels->conv(&op.conv, share.begin, share.end, scratch); break;
        case kOpDelta: kernels->delta(&op.delta, share.begin, share.end, scratch); break;
        case kOpSpace: kernels->space(&op.space, share.begin, share.end, scratch); break;
        case kOpExperts:
            stream_file_parts(op.experts.each, share, expert_strips(op.experts));
            if (const Status found = expert_tiles(*kernels, op.experts, share, scratch))
                unusable_ = found;
            break;
        case kOpHeads:
            stream_file_parts(op.heads.each, share, head_strips(op.heads));
            head_tiles(*kernels, op.heads, share, scratch);
            break;
        case kOpGroup: group_rows(op.group); break;
        case kOpFetch:
            if (op.fetch.chosen) op.fetch.cache->expect(op.fetch);
            else op.fetch.cache->fetch(op.fetch);
            break;
        case kOpTransfer: transfer(op.transfer); break;
        case kOpLowRank:
            (kind == Program::kTiles ? kernels->low_rank_down : kernels->low_rank_up)(
                &op.low_rank, share.begin, share.end, scratch);
            break;
        default:
            if (op.sample.masks && op.sample.masks->count) wait_for_masks(pool, *op.sample.masks);
            kernels->sample(&op.sample, share.begin, share.end, scratch);
    }
}

void Runtime::run_task(void* context, int phase, const ItemRange& task, int thread) {
    const Frame& frame = *static_cast<const Frame*>(context);
    if (task.begin == task.end) return;
    Program& program = *frame.program;
    const Program::Stage& stage = program.stages_[(size_t)phase];
    ItemRange share = task;
    if (stage.then >= 0) {
        const ItemRange next = frame.runtime->pool.own(frame.runtime->phases_[(size_t)stage.then], thread);
        frame.runtime->hint(program, stage.then, next, &share);
    }
    if (stage.hinted) {
        const ItemRange own = frame.runtime->pool.own(frame.runtime->phases_[(size_t)phase], thread);
        share.resumed |= share.begin == own.begin;
    }
    OperatorTimes::Laps laps(program.times, thread);
    const bool tiled = stage.work != Program::kRows, joined = tiled && stage.last - stage.first > 1;
    if (joined) frame.runtime->products(program, phase, share, thread, &laps);
    for (int i = stage.first; !joined && i < stage.last; ++i) {
        const Program::Part& part = program.parts_[(size_t)i];
        const Op& op = program.ops_[(size_t)part.op];
        if (tiled) frame.runtime->tiles(op, stage.work, share, thread);
        else frame.runtime->rows(op, part.work, share.begin * op.per, share.end * op.per);
        laps.lap(part.op, tiled ? OperatorTimes::kTilePart : OperatorTimes::kRowPart);
    }
    if (stage.down < 0) return;
    frame.runtime->tiles(program.ops_[(size_t)stage.down], Program::kTiles,
                         frame.runtime->down_units(program, phase, share), thread);
    laps.lap(stage.down, OperatorTimes::kTilePart);
}

bool Runtime::begin_pack(const PackJob& job, int64_t work) {
    if (!reserve_private(job.w->dense ? 0 : pack_scratch(*job.w))) return false;
    packing_ = job;
    packing_phase_ = {job.blocks, tasks_for(job.blocks, work)};
    pool.begin(
        [](void* context, int, const ItemRange& share, int thread) {
            Runtime* self = static_cast<Runtime*>(context);
            const PackJob& job = self->packing_;
            const int64_t begin = job.first + share.begin, end = job.first + share.end;
            if (job.w->dense)
                dense_blocks(*job.w, const_cast<void*>(job.source), false, job.first, begin, end);
            else
                pack_blocks(*job.w, static_cast<const uint8_t*>(job.source), job.row_bytes, job.first,
                            begin, end, self->private_scratch(thread));
        },
        this, &packing_phase_, 1);
    return true;
}

void Runtime::settle() {
    if (packing_.w && !pool.inherited()) pool.finish();
    packing_.w = nullptr;
}

void Runtime::close() {
    closed = true;
    pool.stop();
    for (Scratch* memory : {&activations_, &attention_, &private_, &low_}) memory->release();
}

Status Runtime::run(Program& program, const int64_t* given) {
    const int64_t begin = program.times.on() ? OperatorTimes::now() : 0;
    int64_t counts[kCounts] = {given[kTokens], given[kOutputs], given[kRequests], 0};
    if (program.gathered_) counts[kGathered] = *program.gathered_;
    const Status status = prepare(program, counts);
    if (status != kOk) return status;
    for (const Op& op : program.ops_) {
        if (op.kind != kOpSample || !op.sample.masks || !op.sample.masks->count) continue;
        pool.arm_side(compute_masks, const_cast<MaskTasks*>(op.sample.masks),
                      (int)op.sample.masks->count);
    }
    Frame frame = {this, &program};
    pool.run(&Runtime::run_task, &frame, phases_.data(), (int)phases_.size());
    if (program.times.on()) program.times.add_run(OperatorTimes::now() - begin);
    if (const int found = unusable_.exchange(kOk)) return (Status)found;
    return group_ && group_->broken() ? kRankLost : transferred_;
}
