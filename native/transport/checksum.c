#include "checksum.h"

#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define CRC_WORD _mm_crc32_u64
#define CRC_BYTE _mm_crc32_u8
#define HAS_INSTRUCTION __builtin_cpu_supports("sse4.2") /* all x86 processors since 2008 have it */
#define TARGET __attribute__((target("sse4.2")))
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define CRC_WORD __crc32cd
#define CRC_BYTE __crc32cb
#define HAS_INSTRUCTION 1
#define TARGET
#endif

#ifdef HAS_INSTRUCTION
TARGET static uint32_t by_instruction(uint32_t crc, const char *at, uint64_t length) {
  uint64_t wide = crc; /* else x86 clears the upper half in each step */
  for (; length >= 8; at += 8, length -= 8) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    wide = CRC_WORD(wide, word);
  }
  crc = (uint32_t)wide;
  for (; length > 0; at++, length--) crc = CRC_BYTE(crc, (uint8_t)*at);
  return crc;
}
#endif

/* Four bits at a time: for processors where checksums do not matter. */
static uint32_t by_table(uint32_t crc, const char *at, uint64_t length) {
  static const uint32_t table[16] = {0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3,
                                     0x61c69362, 0x7198540d, 0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9,
                                     0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75};
  for (; length > 0; at++, length--) {
    crc ^= (uint8_t)*at;
    crc = crc >> 4 ^ table[crc & 15];
    crc = crc >> 4 ^ table[crc & 15];
  }
  return crc;
}

uint32_t checksum(uint32_t before, const void *bytes, uint64_t length) {
#ifdef HAS_INSTRUCTION
  if (HAS_INSTRUCTION) return ~by_instruction(~before, bytes, length);
#endif
  return ~by_table(~before, bytes, length);
}
