/*
 * Vectors of float32 and bfloat16, in the vector extension of GCC and clang, for the instruction set of the including
 * file, which defines
 *   TARGET        the attribute of functions that use the instruction set
 *   VECTOR_BYTES  the size of its registers
 */
#include <stdint.h>
#include <string.h>

typedef float floats __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES)));

/* As many float32 as a register holds 16-bit floats. Which elements lie in which of the two is up to load and store. */
typedef struct {
  floats first, second;
} float_pair;

enum { LANES = VECTOR_BYTES / sizeof(uint16_t) };

#define VECTOR_FUNCTION TARGET static inline __attribute__((always_inline))

/* `mask` is all ones or all zeros in each element, as comparisons of vectors are. */
VECTOR_FUNCTION words select_words(words mask, words a, words b) { return (mask & a) | (~mask & b); }

VECTOR_FUNCTION words load_words(const uint16_t* from) {
  words value;
  memcpy(&value, from, sizeof value);
  return value;
}
VECTOR_FUNCTION void store_words(uint16_t* to, words value) { memcpy(to, &value, sizeof value); }

/* A bfloat16 is the upper half of a float32: in a word that holds two, one is in place and one a shift away. */
VECTOR_FUNCTION float_pair load_bfloat16(const uint16_t* from) {
  words both = load_words(from);
  return (float_pair){(floats)(both << 16), (floats)(both & 0xffff0000u)};
}

/* The upper halves hold the result. No NaN becomes infinity by it: it is that of a bfloat16 or the processor's own, and
 * the lower halves of these are 0. */
VECTOR_FUNCTION words round_to_bfloat16(floats value) {
  words bits = (words)value;
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

VECTOR_FUNCTION void store_bfloat16(uint16_t* to, float_pair value) {
  words lower = round_to_bfloat16(value.first) >> 16, upper = round_to_bfloat16(value.second) & 0xffff0000u;
  store_words(to, lower | upper);
}
