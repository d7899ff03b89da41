// The table of a level, and its kernels but for attention and products with weights.
#include "kernels.hpp"

#include "causal_conv.hpp"
#include "elementwise.hpp"
#include "low_rank.hpp"
#include "recode.hpp"
#include "recurrent.hpp"
#include "rope.hpp"
#include "round_rows.hpp"
#include "sampling.hpp"

extern "C" {
extern const KernelTable OF_LEVEL(kernels);
const KernelTable OF_LEVEL(kernels) = {
    LEVEL::kWideInWords > 0,
    OF_LEVEL(quantize), OF_LEVEL(linear_int), OF_LEVEL(linear_float), nullptr, nullptr, LEVEL::norm,
    LEVEL::activation, LEVEL::map, LEVEL::gate, LEVEL::rope, OF_LEVEL(attention),
    LEVEL::recode,   LEVEL::rope_angles, LEVEL::sample, LEVEL::sample_scratch,
    LEVEL::conv, LEVEL::delta, LEVEL::space, LEVEL::rates, LEVEL::gated_norm,
    LEVEL::low_rank_down, LEVEL::low_rank_up, LEVEL::round_rows,
};
}
