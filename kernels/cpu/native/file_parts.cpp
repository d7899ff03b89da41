#include "file_parts.hpp"

#include "linear_scratch.hpp"
#include "pack.hpp"
#include "system.hpp"

namespace {

// Linux reads at most this much per request, whatever its length: read_ahead_kb of most disks.
constexpr uintptr_t kAskedAtOnce = 128 * 1024;

uintptr_t page_of(uintptr_t at) { return at / page_size() * page_size(); }
uintptr_t page_after(uintptr_t at) { return page_of(at + page_size() - 1); }

struct Pages {
    uintptr_t begin, end;
};

// Rounded to whole pages, so that neighbouring ranges share none.
Pages pages_of(const FilePart& part, int64_t begin, int64_t end, int64_t total) {
    const uintptr_t first = (uintptr_t)part.begin;
    const uintptr_t from = first + (uintptr_t)(part.bytes * begin / total);
    const uintptr_t to = first + (uintptr_t)(part.bytes * end / total);
    return {page_of(from), end == total ? page_after(to) : page_of(to)};
}

// Bytes of the codes, or of the plain values, before a strip.
int64_t strip_bytes(const Weight& w, int64_t strip) {
    if (!w.dense) return code_bytes(w, strip);
    const int64_t before = strip * kStripBlocks;
    const int64_t row_blocks = before < w.row_blocks ? before : w.row_blocks;
    return row_blocks * kTileRows * w.k * (int64_t)element_size(w.scale_type);
}

void release(Pages pages) {
    if (pages.begin < pages.end) release_pages((void*)pages.begin, pages.end - pages.begin);
}

}  // namespace

void stream_file_parts(const LinearArgs& args, const ItemRange& share, int64_t total) {
    if (args.file && args.file->next && args.file->next->whole) {
        const Pages pages = pages_of(*args.file->next, share.begin, share.end, total);
        for (uintptr_t at = pages.begin; at < pages.end; at += kAskedAtOnce) {
            const uintptr_t rest = pages.end - at;
            will_need((void*)at, rest < kAskedAtOnce ? rest : kAskedAtOnce);
        }
    }
    if (args.done) release(pages_of(*args.done, share.begin, share.end, total));
}

void release_part(const FilePart* part) {
    if (part) release(pages_of(*part, 0, 1, 1));
}

void release_strips(const FilePart* part, const Weight& w, int64_t begin, int64_t end) {
    if (!part || w.codes < part->begin || w.codes >= part->begin + part->bytes) return;
    const uintptr_t codes = (uintptr_t)w.codes;
    release({page_after(codes + (uintptr_t)strip_bytes(w, begin)),
             page_of(codes + (uintptr_t)strip_bytes(w, end))});
}
