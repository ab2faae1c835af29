/* Which segments this process has mapped. Contexts of several threads share this list. */
#define _GNU_SOURCE 1
#include "shared_memory.h"

#include "fork_lock.h"
#include "shared_memory_map.h"
#include "shared_memory_system.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

static struct segment *segments;

/* A child gets no mapping (segment_map_file) and must not keep the segment's memory alive
 * through a descriptor either. */
static void forget_parent(void) {
  for (struct segment *segment = segments; segment; segment = segment->next) {
    segment->layout = NULL;
    segment->named = false;
    if (segment->fd >= 0) close(segment->fd);
    if (segment->memory_fd >= 0) close(segment->memory_fd);
    segment->fd = segment->memory_fd = -1;
  }
  segments = NULL;
}

FORK_LOCK(forget_parent)

static void enter(struct segment *segment) {
  segment->references = 1;
  segment->next = segments;
  segments = segment;
}

static uint32_t free_place(void) {
  uint32_t place = 1;
  for (const struct segment *segment = segments; segment;) {
    bool taken = segment->owned && segment->place == place;
    place += taken;
    segment = taken ? segments : segment->next;
  }
  return place;
}

int segment_create(struct segment **result) {
  struct segment *segment = calloc(1, sizeof *segment);
  if (!segment) return ENOMEM;
  segment->owned = true;
  segment->fd = segment->memory_fd = -1;
  segment->regions = calloc(SEGMENT_REGIONS, sizeof *segment->regions);
  if (!segment->regions) {
    free(segment);
    return ENOMEM;
  }

  lock_list();
  int error = getentropy(&segment->cookie, sizeof segment->cookie) ? errno : segment_map_new(segment);
  if (!error) enter(segment);
  unlock_list();
  if (error) {
    free(segment->regions);
    free(segment);
    return error;
  }

  struct segment_header *header = &segment->layout->header;
  header->cookie = segment->cookie;
  header->bytes = SEGMENT_BYTES;
  header->base = (uint64_t)(uintptr_t)segment->layout;
  header->version = SEGMENT_VERSION;
  atomic_store_explicit(&header->magic, SEGMENT_MAGIC, memory_order_release);
  *result = segment;
  return 0;
}

static int check_header(const struct segment *segment) {
  const struct segment_header *header = &segment->layout->header;
  if (header->magic != SEGMENT_MAGIC || header->version != SEGMENT_VERSION || header->bytes != SEGMENT_BYTES)
    return EINVAL;
  return header->cookie == segment->cookie ? 0 : EINVAL;
}

static int map_peer(const union ibv_gid *gid, struct segment **result) {
  struct segment *segment = calloc(1, sizeof *segment);
  if (!segment) return ENOMEM;
  segment->gid = *gid;
  segment->fd = segment->memory_fd = -1;
  int fd, error = segment_open_peer(gid, &fd, &segment->cookie);
  if (!error) {
    error = segment_map_file(segment, fd);
    close(fd);
  }
  if (!error && (error = check_header(segment))) munmap(segment->layout, SEGMENT_BYTES);
  if (error) {
    free(segment);
    return error;
  }
  segment->regions = segment->layout->regions;
  enter(segment);
  *result = segment;
  return 0;
}

int segment_open(const union ibv_gid *gid, struct segment **result) {
  int error = 0;
  lock_list();
  struct segment *segment = segments;
  while (segment && memcmp(&segment->gid, gid, sizeof *gid) != 0) segment = segment->next;
  if (!segment) {
    error = map_peer(gid, result);
  } else if (atomic_load(&segment->layout->header.closed)) {
    error = ENOENT;
  } else {
    segment->references++;
    *result = segment;
  }
  unlock_list();
  return error;
}

int segment_enumerate(struct segment *segment) {
  lock_list();
  segment->place = free_place();
  atomic_store_explicit(&segment->layout->header.place, segment->place, memory_order_release);
  unlock_list();
  return segment_number(segment) ? 0 : EMFILE;
}

/* Those that are mapped may have lost their name. */
int segment_find(uint32_t number, union ibv_gid *gid) {
  int error = segment_look_up(number, gid);
  if (!error) return 0;
  lock_list();
  struct segment *segment = segments;
  while (segment && (atomic_load(&segment->layout->header.closed) || segment_number(segment) != number))
    segment = segment->next;
  if (segment) *gid = segment->gid;
  unlock_list();
  return segment ? 0 : error;
}

int segment_memory(struct segment *segment) {
  lock_list();
  if (segment->memory_fd < 0) segment->memory_fd = segment_open_memory(segment);
  int fd = segment->memory_fd;
  unlock_list();
  return fd;
}

void segment_close(struct segment *segment) {
  if (!segment->layout) return;
  atomic_store(&segment->layout->header.closed, 1);
  lock_list();
  segment_remove_name(segment);
  if (segment->fd >= 0) close(segment->fd);
  segment->fd = -1;
  unlock_list();
}

void segment_release(struct segment *segment) {
  lock_list();
  bool last = --segment->references == 0;
  if (last) {
    struct segment **link = &segments;
    while (*link && *link != segment) link = &(*link)->next;
    if (*link) *link = segment->next;
    if (segment->layout) munmap(segment->layout, SEGMENT_BYTES);
    if (segment->memory_fd >= 0) close(segment->memory_fd);
    if (segment->owned) free(segment->regions);
  }
  unlock_list();
  if (last) free(segment);
}
