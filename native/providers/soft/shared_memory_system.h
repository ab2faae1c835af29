/* What differs between systems: shared_memory_memfd.c (Linux) and shared_memory_posix.c (macOS). Both make segments of
 * mode 0600. */
#pragma once

#include "shared_memory.h"

/* Makes SEGMENT_BYTES of zeroed shared memory. Sets layout, gid, fd and named; cookie is set already. */
int segment_map_new(struct segment* segment);

/* Opens the file of the segment at `gid`, which also says what cookie its header must have. */
int segment_open_peer(const union ibv_gid* gid, int* fd, uint64_t* cookie);

/* The number by the GID and the place in the header; 0: none. */
uint32_t segment_number(const struct segment* segment);

/* segment_find, for those that are not mapped. */
int segment_look_up(uint32_t number, union ibv_gid* gid);

/* Opens what segment_memory returns. */
int segment_open_memory(const struct segment* segment);

/* Removes the name, if there is one; mappings stay. */
void segment_remove_name(struct segment* segment);

/* Zeroes whole pages and returns them to the system where it can. */
void segment_zero_pages(void* memory, size_t bytes);
