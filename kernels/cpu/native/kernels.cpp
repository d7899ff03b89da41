// Compiled once per instruction-set level (CMakeLists.txt sets LEVEL and the flags). Exports one table;
// nothing else in this object is visible to the linker.
#include "attention.hpp"
#include "elementwise.hpp"
#include "linear_float.hpp"
#include "linear_int.hpp"
#include "low_rank.hpp"
#include "recode.hpp"
#include "rope.hpp"
#include "sampling.hpp"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

extern "C" {
extern const KernelTable JOIN(kernels_, LEVEL);
const KernelTable JOIN(kernels_, LEVEL) = {
    LEVEL::kWideInWords > 0,
    LEVEL::quantize, LEVEL::linear_int, LEVEL::linear_float, LEVEL::norm,
    LEVEL::activation, LEVEL::map,        LEVEL::rope,         LEVEL::attention,
    LEVEL::recode,   LEVEL::rope_angles, LEVEL::sample, LEVEL::sample_scratch,
    LEVEL::low_rank_down, LEVEL::low_rank_up,
};
}
