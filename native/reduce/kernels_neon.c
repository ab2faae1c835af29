/* arm64: NEON converts float16. */
#if defined(__aarch64__)

#include <arm_neon.h>

#define TARGET
#define VECTOR_BYTES 16
#include "vectors.h"

VECTOR_FUNCTION float_pair load_float16(const uint16_t *from) {
  float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(from));
  return (float_pair){vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}

VECTOR_FUNCTION void store_float16(uint16_t *to, float_pair value) {
  vst1q_u16(to, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(value.first), value.second)));
}

VECTOR_FUNCTION floats sum_floats(floats a, floats b) { return a + b; }

/* A NaN wins from either side; of equal numbers, which may be 0 and -0, the first does. vmaxq_f32 would take 0. */
VECTOR_FUNCTION floats max_floats(floats a, floats b) {
  return vbslq_f32(vorrq_u32(vcgeq_f32(a, b), vmvnq_u32(vceqq_f32(a, a))), a, b);
}
VECTOR_FUNCTION floats min_floats(floats a, floats b) {
  return vbslq_f32(vorrq_u32(vcleq_f32(a, b), vmvnq_u32(vceqq_f32(a, a))), a, b);
}

#include "half_kernels.h"
#include "kernels.h"

reduce_table reduce_neon = {KERNEL_ROWS, HALF_ROWS};

#endif
