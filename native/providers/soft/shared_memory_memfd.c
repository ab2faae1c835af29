/* Segments on Linux: memory without a name, so that a SIGKILL at any moment leaves nothing behind. Peers of the
 * same user open it through /proc/<pid>/fd/<fd>. */
#define _GNU_SOURCE 1
#include "shared_memory_system.h"

#include "shared_memory_map.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* A sealed size can neither shrink nor grow: reading a mapped page never ends in SIGBUS, dead owner or not. */
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define NAME "mlxdist"
#define PLACE_BITS 6 /* of a number; the others are 22 bits of a process id, as many as Linux has */
#define PLACES ((1u << PLACE_BITS) - 1)

struct address {
  uint8_t prefix[2];
  uint16_t fd;
  int32_t pid;
  uint64_t cookie;
};
_Static_assert(sizeof(struct address) == sizeof(union ibv_gid), "an address is a GID");

int segment_map_new(struct segment *segment) {
  int fd = memfd_create(NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return errno;
  /* A memfd is born with mode 0777; what keeps others out already is that /proc/<pid>/fd is the owner's. */
  int error = fchmod(fd, 0600) || ftruncate(fd, (off_t)SEGMENT_BYTES) || fcntl(fd, F_ADD_SEALS, SEALS) ? errno : 0;
  if (!error && fd > UINT16_MAX) error = EMFILE;
  if (!error) error = segment_map_file(segment, fd);
  if (error) {
    close(fd);
    return error;
  }
  struct address address = {.fd = (uint16_t)fd, .pid = getpid(), .cookie = segment->cookie};
  memcpy(address.prefix, segment_prefix, sizeof address.prefix);
  memcpy(&segment->gid, &address, sizeof address);
  segment->fd = fd;
  return 0;
}

/* Whether `path` is a segment, found out without opening it: opening a descriptor of a process that has
 * inherited the id of a dead peer could do anything, block on a pipe for one. */
static int check_link(const char *path) {
  static const char expected[] = "/memfd:" NAME " ";
  char target[64];
  ssize_t length = readlink(path, target, sizeof target);
  if (length < 0) return errno;
  return length >= (ssize_t)strlen(expected) && !memcmp(target, expected, strlen(expected)) ? 0 : EINVAL;
}

static int open_segment(const struct address *address, int *fd) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", address->pid, address->fd);
  int error = check_link(path);
  if (error) return error;
  *fd = open(path, O_RDWR | O_CLOEXEC);
  if (*fd < 0) return errno;
  struct stat status;
  if (fstat(*fd, &status))
    error = errno;
  else if (status.st_size != (off_t)SEGMENT_BYTES || fcntl(*fd, F_GET_SEALS) != SEALS)
    error = EINVAL;
  if (error) close(*fd);
  return error;
}

int segment_open_peer(const union ibv_gid *gid, int *fd, uint64_t *cookie) {
  struct address address;
  memcpy(&address, gid, sizeof address);
  *cookie = address.cookie;
  if (address.pid <= 0 || memcmp(address.prefix, segment_prefix, sizeof address.prefix) != 0) return EINVAL;
  return open_segment(&address, fd);
}

uint32_t segment_number(const struct segment *segment) {
  struct address address;
  memcpy(&address, &segment->gid, sizeof address);
  uint32_t place = segment->owned ? segment->place : atomic_load(&segment->layout->header.place);
  return place > 0 && place <= PLACES ? (uint32_t)address.pid << PLACE_BITS | place : 0;
}

/* Whether the process's segment in that place has the address, whose cookie is filled in. */
static bool is_in_place(struct address *address, uint32_t place) {
  struct segment_header header;
  int fd;
  if (open_segment(address, &fd)) return false;
  bool found =
      pread(fd, &header, sizeof header, 0) == sizeof header && header.magic == SEGMENT_MAGIC && header.place == place;
  if (found) address->cookie = header.cookie;
  close(fd);
  return found;
}

int segment_look_up(uint32_t number, union ibv_gid *gid) {
  struct address address = {.pid = (int32_t)(number >> PLACE_BITS)};
  if (!(number & PLACES)) return ENOENT;
  memcpy(address.prefix, segment_prefix, sizeof address.prefix);
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd", address.pid);
  DIR *files = opendir(path);
  if (!files) return errno;
  bool found = false;
  for (struct dirent *entry; !found && (entry = readdir(files));) {
    address.fd = (uint16_t)strtoul(entry->d_name, NULL, 10);
    found = is_in_place(&address, number & PLACES);
  }
  closedir(files);
  if (found) memcpy(gid, &address, sizeof address);
  return found ? 0 : ENOENT;
}

/* What says that it is the owner's memory: the segment's cookie is where the owner has mapped it. */
static bool is_of_owner(const struct segment *segment, int fd) {
  uint64_t cookie;
  off_t place = (off_t)(segment->layout->header.base + offsetof(struct segment_header, cookie));
  return pread(fd, &cookie, sizeof cookie, place) == sizeof cookie && cookie == segment->cookie;
}

int segment_open_memory(const struct segment *segment) {
  struct address address;
  memcpy(&address, &segment->gid, sizeof address);
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/mem", address.pid);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0 || is_of_owner(segment, fd)) return fd;
  close(fd);
  errno = ESRCH;
  return -1;
}

void segment_remove_name(struct segment *segment) { (void)segment; /* there is none */ }

void segment_zero_pages(void *memory, size_t bytes) {
  if (madvise(memory, bytes, MADV_REMOVE)) memset(memory, 0, bytes);
}
