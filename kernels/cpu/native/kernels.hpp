// The kernels of one instruction-set level, which are compiled in three objects, so that a build of a
// level uses several cores: CMakeLists.txt sets LEVEL and the flags. Only what is declared here, and
// the table of kernels.cpp, is visible to the linker.
#pragma once

#include "abi.hpp"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
// OF_LEVEL(attention) is attention_avx2 at that level.
#define OF_LEVEL(name) JOIN(name##_, LEVEL)

extern "C" {
void OF_LEVEL(attention)(const AttentionArgs* a, const ItemRange* items, uint8_t* scratch);
void OF_LEVEL(quantize)(const LinearArgs* a, int64_t m_begin, int64_t m_end);
void OF_LEVEL(linear_int)(const LinearArgs* a, const ItemRange* strips, uint8_t* scratch);
void OF_LEVEL(linear_float)(const LinearArgs* a, const ItemRange* strips, uint8_t* scratch);
void OF_LEVEL(linear_bf16)(const LinearArgs* a, const ItemRange* strips, uint8_t* scratch);
void OF_LEVEL(attention_bf16)(const AttentionArgs* a, const ItemRange* items, uint8_t* scratch);
}
