/* SipHash-2-4 with 128 bits: a keyed hash that cannot be computed, and reveals nothing, without the key
 * (Aumasson and Bernstein, 2012). Short inputs, no tables: what a handshake needs, without a library. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define SIPHASH_BYTES 16 /* of the key, and of the hash */

void siphash(const uint8_t key[SIPHASH_BYTES], const void* bytes, size_t length, uint8_t hash[SIPHASH_BYTES]);
