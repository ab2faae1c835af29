/* 16-bit floats to float32 and back, without branches so that compilers vectorize the loops around them. */
#ifndef MLXDIST_REDUCE_CONVERT_H
#define MLXDIST_REDUCE_CONVERT_H

#include <stdint.h>
#include <string.h>

static inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_of_bfloat16(uint16_t b) { return float_of_bits((uint32_t)b << 16); }

static inline uint16_t bfloat16_of_float(float value) {
  uint32_t bits = bits_of_float(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  uint32_t quiet = (bits >> 16) | 0x40; /* rounding could turn a NaN into infinity */
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

/* Moves exponent and mantissa into place; the multiplication corrects the exponent's bias and makes
 * subnormals normal, exactly. Infinity and NaN (exponent 31) get float32's largest exponent. */
static inline float float_of_float16(uint16_t h) {
  uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13;
  uint32_t bits = bits_of_float(float_of_bits(magnitude) * 0x1p112f);
  bits |= magnitude >= 0x0f800000u ? 0x7f800000u : 0;
  return float_of_bits(bits | (uint32_t)(h & 0x8000) << 16);
}

/* Normal results: re-bias the exponent and round the 13 lost bits. Subnormal results: adding 0.5 puts the
 * ten mantissa bits at the bottom of the sum, rounded by the addition. */
static inline uint16_t float16_of_float(float value) {
  uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu;
  uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  uint32_t subnormal = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t special = magnitude > 0x7f800000u ? 0x7e00 : 0x7c00;
  uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
  return (uint16_t)(sign | (magnitude >= (143u << 23) ? special : half));
}

#endif
