// Attention of one level: see kernels.hpp.
#include "kernels.hpp"

#include "attention.hpp"

extern "C" void OF_LEVEL(attention)(const AttentionArgs* a, const ItemRange* items, uint8_t* scratch) {
    LEVEL::attention(a, items, scratch);
}
