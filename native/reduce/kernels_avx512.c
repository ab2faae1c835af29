/* x86-64 with AVX-512: it converts twice as many 16-bit floats at a time. Other dtypes only wait for the cache. */
#if defined(__x86_64__)

#define TARGET __attribute__((target("avx512f")))
#define VECTOR_BYTES 64
#include "vectors.h"

#include <immintrin.h>

VECTOR_FUNCTION float_pair load_float16(const uint16_t *from) {
  return (float_pair){_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)),
                      _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + LANES / 2)))};
}

VECTOR_FUNCTION void store_float16(uint16_t *to, float_pair value) {
  __m256i first = _mm512_cvtps_ph(value.first, _MM_FROUND_TO_NEAREST_INT);
  __m256i second = _mm512_cvtps_ph(value.second, _MM_FROUND_TO_NEAREST_INT);
  _mm512_storeu_si512(to, _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
}

/* a + b exactly. Of the units of a Zen 5, those that add also convert float16; those that multiply are free. */
VECTOR_FUNCTION floats sum_floats(floats a, floats b) { return _mm512_fmadd_ps(a, _mm512_set1_ps(1), b); }

/* The instruction gives its second operand if they are equal or one is NaN: that must still be b if b is. */
VECTOR_FUNCTION floats max_floats(floats a, floats b) {
  return _mm512_mask_mov_ps(_mm512_max_ps(b, a), _mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q), b);
}
VECTOR_FUNCTION floats min_floats(floats a, floats b) {
  return _mm512_mask_mov_ps(_mm512_min_ps(b, a), _mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q), b);
}

#include "half_kernels.h"

reduce_table reduce_avx512 = {HALF_ROWS};

#endif
