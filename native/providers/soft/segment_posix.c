/*
 * Segments on macOS, which has no memory without a name. The owner removes the name as soon as every queue
 * pair's peer has mapped the segment, and at the latest in close_device. Only a process that is killed before
 * its group has connected leaves one behind, and the next process removes it. A segment whose name is gone
 * cannot be opened by further processes: ranks that join later need a context of their own.
 */
#define _GNU_SOURCE 1
#include "names_posix.h"
#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

struct address {
  uint64_t nonce; /* of the name; its first bytes are the prefix */
  uint64_t cookie;
};
_Static_assert(sizeof(struct address) == sizeof(union ibv_gid), "an address is a GID");

static uint32_t number_of(uint64_t nonce) { return (uint32_t)(nonce >> 32) % SEGMENT_NUMBERS; }

int segment_map_new(struct segment *segment) {
  struct address address = {.cookie = segment->cookie};
  if (getentropy(&address.nonce, sizeof address.nonce)) return errno;
  memcpy(&address.nonce, segment_prefix, sizeof segment_prefix);
  char name[NAME_BYTES];
  names_write(address.nonce, name);
  names_remove_dead();
  names_note(address.nonce);
  int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
  int error = fd < 0 ? errno : 0;
  if (!error) {
    error = ftruncate(fd, (off_t)SEGMENT_BYTES) ? errno : segment_map_file(segment, fd);
    close(fd);
    if (error) shm_unlink(name);
  }
  if (error) {
    names_strike_out(address.nonce);
    return error;
  }
  memcpy(&segment->gid, &address, sizeof address);
  segment->named = true;
  return 0;
}

static int open_segment(uint64_t nonce, int *fd) {
  char name[NAME_BYTES];
  names_write(nonce, name);
  *fd = shm_open(name, O_RDWR, 0);
  if (*fd < 0) return errno;
  struct stat status;
  int error = fstat(*fd, &status) ? errno : 0;
  if (!error && status.st_size < (off_t)SEGMENT_BYTES) error = EINVAL;
  if (error) close(*fd);
  return error;
}

int segment_map_peer(struct segment *segment) {
  struct address address;
  memcpy(&address, &segment->gid, sizeof address);
  int fd;
  int error = open_segment(address.nonce, &fd);
  if (error) return error;
  error = segment_map_file(segment, fd);
  close(fd);
  segment->cookie = address.cookie;
  return error;
}

uint32_t segment_number(const struct segment *segment) {
  struct address address;
  memcpy(&address, &segment->gid, sizeof address);
  return number_of(address.nonce);
}

int segment_look_up(uint32_t number, union ibv_gid *gid) {
  struct address address;
  if (!names_find(number_of, number, &address.nonce)) return ENOENT;
  int fd;
  int error = open_segment(address.nonce, &fd);
  if (error) return error;
  struct segment_header *header = mmap(NULL, SEGMENT_PAGE, PROT_READ, MAP_SHARED, fd, 0);
  error = header == MAP_FAILED ? errno : 0;
  close(fd);
  if (error) return error;
  bool complete = atomic_load_explicit(&header->magic, memory_order_acquire) == SEGMENT_MAGIC;
  address.cookie = header->cookie;
  munmap(header, SEGMENT_PAGE);
  if (complete) memcpy(gid, &address, sizeof address);
  return complete ? 0 : ENOENT;
}

int segment_open_memory(const struct segment *segment) {
  (void)segment; /* macOS gives other processes' memory to debuggers alone */
  errno = EOPNOTSUPP;
  return -1;
}

void segment_remove_name(struct segment *segment) {
  if (!segment->named) return;
  struct address address;
  memcpy(&address, &segment->gid, sizeof address);
  char name[NAME_BYTES];
  names_write(address.nonce, name);
  shm_unlink(name);
  names_strike_out(address.nonce);
  segment->named = false;
}

void segment_zero_pages(void *memory, size_t bytes) { memset(memory, 0, bytes); }
