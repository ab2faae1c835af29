/* CRC32C (Castagnoli; RFC 3720, appendix B.4), which x86 and arm64 have an instruction for. */
#pragma once

#include <stdint.h>

/* Of `bytes` behind those that `before` is of; 0 to begin with. */
uint32_t checksum(uint32_t before, const void* bytes, uint64_t length);
