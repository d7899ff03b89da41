// Ranks and stages.
#include "driver.hpp"

#include <atomic>
#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

namespace {

namespace fs = std::filesystem;

// A new folder of its own.
fs::path new_folder() {
    static std::atomic<int> count{0};
    const auto now = std::chrono::system_clock::now().time_since_epoch().count();
    const std::string name = "embedlm-driver-" + std::to_string(now) + "-" + std::to_string(count++);
    const fs::path folder = fs::temp_directory_path() / name;
    CHECK(fs::create_directory(folder));
    return folder;
}

// Whole experts on each rank, the first on all: every row of expert e is e + 1, added up over tokens.
void share_experts(RankGroup* group, TestRuntime& runtime, int rank, int size) {
    const int64_t tokens = 9, width = 24;
    const int32_t k = 2, all = 2 * size + 1;
    Buffer<int32_t> first(all + 1), ranks(all + size), local(all);
    int32_t copies = 0, count = 0;
    for (int32_t e = 0; e < all; ++e) {
        first[e] = copies;
        local[e] = e == 0 || e % size == rank ? count++ : -1;
        for (int32_t r = 0; r < size; ++r)
            if (e == 0 || e % size == r) ranks[copies++] = r;
    }
    first[all] = copies;
    const int64_t rows = tokens * k;
    Buffer<int64_t> load(all);
    Buffer<int32_t> chosen(rows), places(rows), whose(rows), owners(rows), servers(rows);
    Buffer<int32_t> starts(count + 1), active(count + 1);
    Buffer<float> x(rows * width), bias(count * width), weights(rows), sum(tokens * width);
    for (int32_t e = 0; e < all; ++e) {
        load[e] = 0;
        for (int64_t i = 0; local[e] >= 0 && i < width; ++i) bias[local[e] * width + i] = (float)(e + 1);
    }
    for (int64_t i = 0; i < rows; ++i) {
        chosen[i] = (int32_t)(i % 3 ? i % all : 0);
        weights[i] = 1.0f;
    }
    const GroupArgs grouped = {chosen.data(), places.data(), whose.data(), owners.data(), starts.data(),
                               active.data(), count, 0, first.data(), ranks.data(), local.data(),
                               servers.data(), load.data(), k, rank};
    const MapArgs zero = {x.data(), nullptr, width, 0.0f, kMapZero};
    const BiasArgs biased = {x.data(), bias.data(), owners.data(), &starts[count], width};
    const CombineRanksArgs combined = {
        {x.data(), weights.data(), places.data(), nullptr, nullptr, sum.data(), width, k}, group,
        servers.data(), 0};
    void* recorded = embedlm_program_create();
    CHECK(embedlm_program_add(recorded, kOpGroup, &grouped, kTokens, k) == kOk);
    CHECK(embedlm_program_add(recorded, kOpMap, &zero, kTokens, k) == kOk);
    CHECK(embedlm_program_add(recorded, kOpBias, &biased, kTokens, k) == kOk);
    CHECK(embedlm_program_add(recorded, kOpCombineRanks, &combined, kTokens, 1) == kOk);
    for (int64_t m : {tokens, (int64_t)0, (int64_t)1, tokens}) {
        const int64_t counts[kCounts] = {m};
        CHECK(embedlm_program_run(runtime.handle, recorded, counts) == kOk);
        for (int64_t t = 0; t < m; ++t)
            for (int64_t i = 0; i < width; ++i)
                CHECK(sum[t * width + i] == (float)(chosen[t * k] + chosen[t * k + 1] + 2));
    }
    embedlm_program_destroy(recorded);
}

// Every rank has tokens of its own, some of them none; who computes which row goes in turn.
void gather_tokens(RankGroup* group, TestRuntime& runtime, int rank, int size) {
    const int64_t width = 33, most = 16;
    Buffer<float> x(most * width), all(size * most * width), sum(most * width), weights(size * most);
    Buffer<int32_t> starts(size + 1), places(size * most), servers(size * most);
    starts[0] = 0;
    for (int64_t t = 0; t < size * most; ++t) {
        weights[t] = 1.0f;
        servers[t] = (int32_t)(t % size);
        places[t] = servers[t] == rank ? (int32_t)t : -1;
    }
    const GatherRanksArgs gathered = {group, x.data(), all.data(), starts.data(), width, 0};
    const CombineRanksArgs combined = {{all.data(), weights.data(), places.data(), nullptr, nullptr,
                                         sum.data(), width, 1},
                                       group, servers.data(), starts.data(), 0};
    void* recorded = embedlm_program_create();
    CHECK(embedlm_program_add(recorded, kOpGatherRanks, &gathered, kGathered, 1) == kOk);
    CHECK(embedlm_program_add(recorded, kOpCombineRanks, &combined, kGathered, 1) == kOk);
    for (int turn = 0; turn < 20; ++turn) {
        for (int r = 0; r < size; ++r)
            starts[r + 1] = starts[r] + (int32_t)((5 * r + 3 * turn) % (most + 1));
        const int64_t own = starts[rank + 1] - starts[rank];
        for (int64_t i = 0; i < own * width; ++i) x[i] = (float)(1000 * rank + i);
        const int64_t counts[kCounts] = {own};
        CHECK(embedlm_program_run(runtime.handle, recorded, counts) == kOk);
        for (int r = 0; r < size; ++r)
            for (int64_t i = 0; i < (starts[r + 1] - starts[r]) * width; ++i)
                CHECK(all[starts[r] * width + i] == (float)(1000 * r + i));
        for (int64_t i = 0; i < own * width; ++i) CHECK(sum[i] == x[i]);
    }
    embedlm_program_destroy(recorded);
}

// A rank: sums recorded in one program, single sums, gathers of bytes; sizes vary, so that areas grow.
void take_part(const char* folder, int rank, int size, int level) {
    void* group = embedlm_ranks_create(rank, size, size, 0, 60.0);
    CHECK(embedlm_ranks_join(group, folder, 60.0) == kOk);
    TestRuntime runtime(1 + rank % 2, level);
    Random sizes(7);  // the same on every rank
    for (int turn = 0; turn < 12; ++turn) {
        const int64_t most = sizes.between(1, 40), width = sizes.between(1, 300);
        Buffer<float> x(most * width), all(most * width * size);
        const ExchangeArgs sum = {static_cast<RankGroup*>(group), x.data(), nullptr, width, width,
                                  width, width, 0};
        ExchangeArgs gather = sum;
        gather.out = all.data();
        gather.out_width = width * size;
        const MapArgs twice = {x.data(), nullptr, width, 2.0f, kMapScale};
        void* recorded = embedlm_program_create();
        const auto add = [&](OpKind kind, const void* args) {
            CHECK(embedlm_program_add(recorded, kind, args, kTokens, 1) == kOk);
        };
        for (int i = 0; i < 3; ++i) {
            add(kOpExchange, &sum);
            add(kOpMap, &twice);
        }
        add(kOpExchange, &gather);
        for (int64_t m : {most, (int64_t)0, (int64_t)1}) {
            for (int64_t i = 0; i < m * width; ++i) x[i] = (float)(rank + 1);
            const int64_t counts[kCounts] = {m};
            CHECK(embedlm_program_run(runtime.handle, recorded, counts) == kOk);
            const float total = (float)(size * (size + 1) / 2 * size * size * 8);
            for (int64_t i = 0; i < m * width * size; ++i) CHECK(all[i] == total);
        }
        embedlm_program_destroy(recorded);
        Buffer<int32_t> numbers(size);
        CHECK(embedlm_ranks_gather(group, &rank, sizeof rank, numbers.data()) == kOk);
        for (int i = 0; i < size; ++i) CHECK(numbers[i] == i);
    }
    share_experts(static_cast<RankGroup*>(group), runtime, rank, size);
    gather_tokens(static_cast<RankGroup*>(group), runtime, rank, size);
    if (rank == 0) embedlm_ranks_give_up(group);
    int32_t own = rank;
    Buffer<int32_t> numbers(size);
    CHECK(embedlm_ranks_gather(group, &own, sizeof own, numbers.data()) == kRankLost);
    embedlm_ranks_destroy(group);
}

}  // namespace

void ranks(int size, int level) {
    const fs::path folder = new_folder();
    const std::string name = folder.u8string();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
        threads.emplace_back(take_part, name.c_str(), rank, size, level);
    for (std::thread& thread : threads) thread.join();
    for (int rank = 0; rank < size; ++rank)
        CHECK(fs::remove(folder / ("rank-" + std::to_string(rank))));
    CHECK(fs::remove(folder));  // it is empty
}

namespace {

// A stage of a pipeline: receives rows from the one before, doubles them, sends them to the next one.
// Sizes vary, so that slots grow and are used again.
void run_stage(const char* folder, int stage, int stages, int level) {
    void* links[2] = {nullptr, nullptr};  // from the stage before, to the next one
    for (int i = 0; i < 2; ++i) {
        if (stage + i == 0 || stage + i == stages) continue;
        const std::string own = folder + std::string("/link-") + std::to_string(stage + i);
        links[i] = embedlm_ranks_create(1 - i, 2, stages, 4, 60.0);
        CHECK(embedlm_ranks_join(links[i], own.c_str(), 60.0) == kOk);
    }
    TestRuntime runtime(1 + stage % 2, level);
    Random sizes(11);  // the same in every stage
    for (int turn = 0; turn < 12; ++turn) {
        const int64_t most = sizes.between(1, 40), width = sizes.between(1, 300);
        Buffer<float> x(most * width);
        void* recorded = embedlm_program_create();
        const auto add = [&](OpKind kind, const void* args) {
            CHECK(embedlm_program_add(recorded, kind, args, kTokens, 1) == kOk);
        };
        const auto move = [&](void* link) {
            const TransferArgs args = {static_cast<RankGroup*>(link), x.data(), width, 0};
            if (link) add(kOpTransfer, &args);
        };
        const MapArgs twice = {x.data(), nullptr, width, 2.0f, kMapScale};
        move(links[0]);
        add(kOpMap, &twice);
        move(links[1]);
        for (int64_t m : {most, (int64_t)0, (int64_t)1, most, most}) {
            for (int64_t i = 0; i < m * width; ++i) x[i] = stage ? -1.0f : (float)(turn + i);
            const int64_t counts[kCounts] = {m};
            CHECK(embedlm_program_run(runtime.handle, recorded, counts) == kOk);
            const float factor = (float)(2 << stage);
            for (int64_t i = 0; i < m * width; ++i) CHECK(x[i] == factor * (float)(turn + i));
        }
        embedlm_program_destroy(recorded);
    }
    Buffer<uint8_t> bytes(5000);
    for (int64_t i = 0; i < bytes.size(); ++i) bytes[i] = stage ? 0 : (uint8_t)i;
    for (void* link : links)
        if (link) CHECK(embedlm_ranks_transfer(link, bytes.data(), bytes.size()) == kOk);
    for (int64_t i = 0; i < bytes.size(); ++i) CHECK(bytes[i] == (uint8_t)i);
    // Behind a stage that gives up, the next one fails, gives up too, and so on.
    float x = 0;
    for (int i = 0; i < 2; ++i) {
        const TransferArgs args = {static_cast<RankGroup*>(links[i]), &x, 1, 0};
        if (i == 1 && links[i]) embedlm_ranks_give_up(links[i]);
        if (links[i]) CHECK(embedlm_run(runtime.handle, kOpTransfer, &args, 1) == kRankLost);
    }
    for (void* link : links) {
        CHECK(!link || embedlm_ranks_waited_ns(link) >= 0);
        if (link) embedlm_ranks_destroy(link);
    }
}

}  // namespace

void pipeline(int stages, int level) {
    const fs::path folder = new_folder();
    const std::string name = folder.u8string();
    const auto link = [&](int stage) { return folder / ("link-" + std::to_string(stage)); };
    for (int stage = 1; stage < stages; ++stage) CHECK(fs::create_directory(link(stage)));
    std::vector<std::thread> threads;
    for (int stage = 0; stage < stages; ++stage)
        threads.emplace_back(run_stage, name.c_str(), stage, stages, level);
    for (std::thread& thread : threads) thread.join();
    for (int stage = 1; stage < stages; ++stage) {
        for (const char* end : {"rank-0", "rank-1"}) CHECK(fs::remove(link(stage) / end));
        CHECK(fs::remove(link(stage)));
    }
    CHECK(fs::remove(folder));
}
