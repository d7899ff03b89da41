// Products in bfloat16 and attention with them, of a level that has them: see kernels.hpp.
#include "kernels.hpp"

#include "attention_bf16.hpp"
#include "linear_bf16.hpp"

extern "C" {
void OF_LEVEL(linear_bf16)(const LinearArgs* a, const ItemRange* strips, uint8_t* scratch) {
    LEVEL::linear_bf16(a, strips, scratch);
}

void OF_LEVEL(attention_bf16)(const AttentionArgs* a, const ItemRange* items, uint8_t* scratch) {
    LEVEL::attention_bf16(a, items, scratch);
}
}
