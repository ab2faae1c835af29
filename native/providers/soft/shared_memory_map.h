/* How a segment is mapped, on any system. */
#pragma once

#include "shared_memory.h"

/* Maps SEGMENT_BYTES of the file, at a multiple of that, for this process and no child of it. Sets layout. */
int segment_map_file(struct segment* segment, int fd);
