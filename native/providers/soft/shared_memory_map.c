/* See shared_memory_map.h. */
#define _GNU_SOURCE 1
#include "shared_memory_map.h"

#include "../../verbs/pages.h"

#include <errno.h>
#include <sys/mman.h>

/* On a multiple of its size, a power of two: then it never crosses a boundary of 4 GiB, which no region of Apple's
 * devices may. */
int segment_map_file(struct segment *segment, int fd) {
  char *room = mmap(NULL, 2 * SEGMENT_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return errno;
  size_t before = -(uintptr_t)room % SEGMENT_BYTES;
  int flags = MAP_SHARED | MAP_FIXED | MAP_NORESERVE;
  void *memory = mmap(room + before, SEGMENT_BYTES, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (memory == MAP_FAILED || pages_keep_from_children(memory, SEGMENT_BYTES)) {
    int error = errno;
    munmap(room, 2 * SEGMENT_BYTES);
    return error;
  }
  if (before) munmap(room, before);
  munmap(room + before + SEGMENT_BYTES, SEGMENT_BYTES - before);
  segment->layout = memory;
  return 0;
}
