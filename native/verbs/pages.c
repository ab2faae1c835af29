#define _GNU_SOURCE 1 /* MADV_DONTFORK */
#include "pages.h"

#include <errno.h>
#include <sys/mman.h>

#ifdef __APPLE__
#include <mach/vm_inherit.h>
#endif

#define WINDOW ((uint64_t)4 << 30)

static uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/* What fork() does to pages that a device writes: kernels of before 5.12 may leave the device's page to the child, and
 * newer ones copy all of them at once. A child has no use for them. (ibv_fork_init makes ibv_reg_mr do the same, but
 * only on those older kernels.) */
int pages_keep_from_children(void *memory, size_t bytes) {
#ifdef MADV_DONTFORK
  return madvise(memory, bytes, MADV_DONTFORK);
#else
  return minherit(memory, bytes, VM_INHERIT_NONE);
#endif
}

/* A boundary that lies in twice the size leaves the whole size on one of its sides. */
void *pages_alloc(size_t bytes) {
  uint64_t size = round_up(bytes ? bytes : 1, PAGES_UNIT), reserved = 2 * size + PAGES_UNIT;
  if (bytes > WINDOW) {
    errno = ENOMEM;
    return NULL;
  }
  char *reservation = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reservation == MAP_FAILED) return NULL;
  uint64_t begin = (uint64_t)(uintptr_t)reservation, start = round_up(begin, PAGES_UNIT);
  if (start / WINDOW != (start + size - 1) / WINDOW) start = round_up(start, WINDOW);

  char *memory = reservation + (start - begin), *rest = memory + size;
  uint64_t before = start - begin, behind = reserved - before - size;
  if (before) munmap(reservation, before);
  if (behind) munmap(rest, behind);
  if (mprotect(memory, size, PROT_READ | PROT_WRITE) == 0 && pages_keep_from_children(memory, size) == 0) return memory;
  int error = errno;
  munmap(memory, size);
  errno = error;
  return NULL;
}

void pages_free(void *memory, size_t bytes) {
  if (memory) munmap(memory, round_up(bytes ? bytes : 1, PAGES_UNIT));
}
