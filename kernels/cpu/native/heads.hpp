// Products of heads: each head of a token's row is multiplied by that head's own weight. Tokens are the rows of
// each product, so a step of many tokens reads a weight once. Activations are quantized in the order of the
// products: head by head, token by token.
#pragma once

#include "levels.hpp"
#include "linear_scratch.hpp"

// Strips of all heads, head by head.
inline int64_t head_strips(const HeadsArgs& args) { return args.count * strips_of(*args.each.w); }

// Quantizes the rows begin..end, which are (token, head).
void quantize_head_rows(const KernelTable& kernels, const HeadsArgs& args, int64_t begin, int64_t end);
// Bytes for one thread.
size_t head_private_bytes(const HeadsArgs& args);
// Some of the head_strips.
void head_tiles(const KernelTable& kernels, const HeadsArgs& args, const ItemRange& share, uint8_t* scratch);
