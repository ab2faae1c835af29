/*
 * Segments on macOS, which has no memory without a name. The owner removes the name as soon as every queue
 * pair's peer has mapped the segment, and at the latest in close_device. Only a process that is killed before
 * its group has connected leaves one behind, and the next process removes it. A segment whose name is gone
 * cannot be opened by further processes: ranks that join later need a context of their own.
 */
#define _GNU_SOURCE 1
#include "shared_memory_system.h"

#include "shared_memory_map.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

/* A name is 64 bits, of them 48 random: it cannot be guessed, and only its owner may open it. */
#define NAME_BYTES 32 /* macOS: 31 characters at most */
#define NOTE_BYTES 64

static void write_name(uint64_t nonce, char name[NAME_BYTES]) {
  snprintf(name, NAME_BYTES, "/mlxdist-%016llx", (unsigned long long)nonce);
}

/* A file without content: process and nonce are its name. */
static void write_note(uint64_t nonce, char note[NOTE_BYTES]) {
  snprintf(note, NOTE_BYTES, "%ld-%016llx", (long)getpid(), (unsigned long long)nonce);
}

/* Not TMPDIR: a rank has one of its own, which goes with its job, and the notes would go with it. */
static void find_place(char *place, size_t bytes) {
#ifdef __APPLE__
  char base[PATH_MAX] = "";
  size_t length = confstr(_CS_DARWIN_USER_TEMP_DIR, base, sizeof base);
  if (length == 0 || length > sizeof base) strcpy(base, "/tmp");
#else
  const char *base = getenv("XDG_RUNTIME_DIR");
  if (!base || base[0] != '/') base = "/tmp";
#endif
  snprintf(place, bytes, "%s/mlxdist-names-%ld", base, (long)getuid());
}

/* The directory of the notes, -1 if there is none of this user's own. */
static int open_directory(void) {
  char place[PATH_MAX + NOTE_BYTES];
  find_place(place, sizeof place);
  if (mkdir(place, 0700) && errno != EEXIST) return -1;
  int directory = open(place, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (directory < 0) return -1;
  struct stat status;
  if (!fstat(directory, &status) && status.st_uid == getuid() && !(status.st_mode & 077)) return directory;
  close(directory);
  return -1;
}

/* macOS cannot list shared memory. So this process notes each name before it makes it, in a directory of this user, and
 * strikes it out when the name is gone. Best effort: where the directory cannot be made, nothing is noted. */
static void note_name(uint64_t nonce) {
  int directory = open_directory();
  if (directory < 0) return;
  char note[NOTE_BYTES];
  write_note(nonce, note);
  int file = openat(directory, note, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file >= 0) close(file);
  close(directory);
}

static void strike_out_name(uint64_t nonce) {
  int directory = open_directory();
  if (directory < 0) return;
  char note[NOTE_BYTES];
  write_note(nonce, note);
  unlinkat(directory, note, 0);
  close(directory);
}

static bool is_dead(long pid) { return pid > 0 && pid <= INT_MAX && kill((pid_t)pid, 0) && errno == ESRCH; }

static bool read_note(const char *note, long *pid, unsigned long long *nonce) {
  int length = 0;
  /* NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): the widths keep the numbers in range */
  return sscanf(note, "%10ld-%16llx%n", pid, nonce, &length) == 2 && note[length] == '\0';
}

static void remove_if_dead(int directory, const char *note) {
  long pid;
  unsigned long long nonce;
  if (!read_note(note, &pid, &nonce) || !is_dead(pid)) return;
  char name[NAME_BYTES];
  write_name(nonce, name);
  if (shm_unlink(name) && errno != ENOENT) return;
  unlinkat(directory, note, 0);
}

static DIR *open_notes(void) {
  int directory = open_directory();
  DIR *notes = directory < 0 ? NULL : fdopendir(directory);
  if (!notes && directory >= 0) close(directory);
  return notes;
}

/* Removes the names that processes left which do not exist any more. A process id that was given again keeps them. */
static void remove_dead_names(void) {
  DIR *notes = open_notes();
  if (!notes) return;
  for (struct dirent *entry; (entry = readdir(notes));) remove_if_dead(dirfd(notes), entry->d_name);
  closedir(notes);
}

static uint32_t number_of(uint64_t nonce) { return (uint32_t)(nonce >> 32) % SEGMENT_NUMBERS; }

/* The nonce, of those that were noted and not struck out, that has the number. */
static bool find_name(uint32_t number, uint64_t *nonce) {
  DIR *notes = open_notes();
  if (!notes) return false;
  bool found = false;
  for (struct dirent *entry; !found && (entry = readdir(notes));) {
    long pid;
    unsigned long long noted;
    found = read_note(entry->d_name, &pid, &noted) && number_of(noted) == number;
    if (found) *nonce = noted;
  }
  closedir(notes);
  return found;
}

struct address {
  uint64_t nonce; /* of the name; its first bytes are the prefix */
  uint64_t cookie;
};
_Static_assert(sizeof(struct address) == sizeof(union ibv_gid), "an address is a GID");

int segment_map_new(struct segment *segment) {
  struct address address = {.cookie = segment->cookie};
  if (getentropy(&address.nonce, sizeof address.nonce)) return errno;
  memcpy(&address.nonce, segment_prefix, sizeof segment_prefix);
  char name[NAME_BYTES];
  write_name(address.nonce, name);
  remove_dead_names();
  note_name(address.nonce);
  int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
  int error = fd < 0 ? errno : 0;
  if (!error) {
    error = ftruncate(fd, (off_t)SEGMENT_BYTES) ? errno : segment_map_file(segment, fd);
    close(fd);
    if (error) shm_unlink(name);
  }
  if (error) {
    strike_out_name(address.nonce);
    return error;
  }
  memcpy(&segment->gid, &address, sizeof address);
  segment->named = true;
  return 0;
}

static int open_segment(uint64_t nonce, int *fd) {
  char name[NAME_BYTES];
  write_name(nonce, name);
  *fd = shm_open(name, O_RDWR, 0);
  if (*fd < 0) return errno;
  struct stat status;
  int error = fstat(*fd, &status) ? errno : 0;
  if (!error && status.st_size < (off_t)SEGMENT_BYTES) error = EINVAL;
  if (error) close(*fd);
  return error;
}

int segment_open_peer(const union ibv_gid *gid, int *fd, uint64_t *cookie) {
  struct address address;
  memcpy(&address, gid, sizeof address);
  *cookie = address.cookie;
  return open_segment(address.nonce, fd);
}

uint32_t segment_number(const struct segment *segment) {
  struct address address;
  memcpy(&address, &segment->gid, sizeof address);
  return number_of(address.nonce);
}

int segment_look_up(uint32_t number, union ibv_gid *gid) {
  struct address address;
  if (!find_name(number, &address.nonce)) return ENOENT;
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
  write_name(address.nonce, name);
  shm_unlink(name);
  strike_out_name(address.nonce);
  segment->named = false;
}

void segment_zero_pages(void *memory, size_t bytes) { memset(memory, 0, bytes); }
