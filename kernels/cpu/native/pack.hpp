// Converts between the canonical tensors of kernels/weights/layouts.py and the tiles of bit_planes.hpp.
#pragma once

#include <stddef.h>

#include "abi.hpp"

// Bytes of a value of a dense weight.
size_t element_size(int type);
// Bytes of the scratch memory `codes` of both below.
size_t pack_scratch(const Weight& w);
// Packs the codes of row blocks begin..end from `source`, the rows from row block `first` on; for ggml's
// blocks the scales too.
void pack_blocks(const Weight& w, const uint8_t* source, int64_t row_bytes, int64_t first,
                 int64_t begin, int64_t end, uint8_t* codes);
// The inverse, into zeroed rows.
void unpack_blocks(const Weight& w, uint8_t* out, int64_t row_bytes, int64_t begin, int64_t end,
                   uint8_t* codes);
// Dense values [N, K], from row block `first` on, <-> [row block][K][16].
void dense_blocks(const Weight& w, void* plain, bool unpack, int64_t first, int64_t begin,
                  int64_t end);
// The rows begin..end of an embedding, with the operations of reference/decode.py.
void gather_rows(const EmbeddingArgs& args, int64_t begin, int64_t end);
