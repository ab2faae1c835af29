/*
 * Access flags of memory regions and queue pairs: what a device takes is found by trying.
 *
 * Peers never read or write this memory themselves, so LOCAL_WRITE is all that is needed, and Apple's technote names no
 * more. But JACCL, llama.cpp and ds4, which run there, use remote access as well, and llama.cpp found LOCAL_WRITE alone
 * rejected. How a provider rejects flags differs, and some give no reason: so any error leads to the next flags.
 */
#ifndef MLXDIST_ENDPOINT_ACCESS_H
#define MLXDIST_ENDPOINT_ACCESS_H

#include "device.h"

/* Calls the verb with these flags. False, with the error in errno, or 0 there if the provider gives none. */
typedef bool access_attempt(void* context, int access);

/* Whether `attempt` succeeds with `*found`, or, where that is 0, with either kind of flags, which `*found` then is. An
 * error names what was tried. */
int access_find(const struct device* device, const char* verb, access_attempt* attempt, void* context, int* found);

#endif
