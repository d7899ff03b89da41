// Products with weights of one level: see kernels.hpp.
#include "kernels.hpp"

#include "linear_float.hpp"
#include "linear_int.hpp"

extern "C" {
void OF_LEVEL(quantize)(const LinearArgs* a, int64_t m_begin, int64_t m_end) {
    LEVEL::quantize(a, m_begin, m_end);
}

void OF_LEVEL(linear_int)(const LinearArgs* a, const ItemRange* strips, uint8_t* scratch) {
    LEVEL::linear_int(a, strips, scratch);
}

void OF_LEVEL(linear_float)(const LinearArgs* a, const ItemRange* strips, uint8_t* scratch) {
    LEVEL::linear_float(a, strips, scratch);
}
}
