/* x86-64 with AVX2, and F16C for float16. */
#if defined(__x86_64__)

#define TARGET __attribute__((target("avx2,f16c")))
#define VECTOR_BYTES 32
#include "vectors.h"

#include <immintrin.h>

VECTOR_FUNCTION float_pair load_float16(const uint16_t *from) {
  return (float_pair){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)),
                      _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + LANES / 2)))};
}

VECTOR_FUNCTION void store_float16(uint16_t *to, float_pair value) {
  __m128i first = _mm256_cvtps_ph(value.first, _MM_FROUND_TO_NEAREST_INT);
  __m128i second = _mm256_cvtps_ph(value.second, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256((__m256i *)to, _mm256_set_m128i(second, first));
}

VECTOR_FUNCTION floats sum_floats(floats a, floats b) { return a + b; }

/* The instruction gives its second operand if they are equal or one is NaN: that must still be b if b is. */
VECTOR_FUNCTION floats max_floats(floats a, floats b) {
  return _mm256_blendv_ps(_mm256_max_ps(b, a), b, _mm256_cmp_ps(b, b, _CMP_UNORD_Q));
}
VECTOR_FUNCTION floats min_floats(floats a, floats b) {
  return _mm256_blendv_ps(_mm256_min_ps(b, a), b, _mm256_cmp_ps(b, b, _CMP_UNORD_Q));
}

#include "half_kernels.h"
#include "kernels.h"

reduce_table reduce_avx2 = {KERNEL_ROWS, HALF_ROWS};

#endif
