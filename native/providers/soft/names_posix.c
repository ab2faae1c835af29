#define _GNU_SOURCE 1
#include "names_posix.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define NOTE_BYTES 64

void names_write(uint64_t nonce, char name[NAME_BYTES]) {
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

/* The folder of the notes, -1 if there is none of this user's own. */
static int open_folder(void) {
  char place[PATH_MAX + NOTE_BYTES];
  find_place(place, sizeof place);
  if (mkdir(place, 0700) && errno != EEXIST) return -1;
  int folder = open(place, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (folder < 0) return -1;
  struct stat status;
  if (!fstat(folder, &status) && status.st_uid == getuid() && !(status.st_mode & 077)) return folder;
  close(folder);
  return -1;
}

void names_note(uint64_t nonce) {
  int folder = open_folder();
  if (folder < 0) return;
  char note[NOTE_BYTES];
  write_note(nonce, note);
  int file = openat(folder, note, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file >= 0) close(file);
  close(folder);
}

void names_strike_out(uint64_t nonce) {
  int folder = open_folder();
  if (folder < 0) return;
  char note[NOTE_BYTES];
  write_note(nonce, note);
  unlinkat(folder, note, 0);
  close(folder);
}

static bool is_dead(long pid) { return pid > 0 && pid <= INT_MAX && kill((pid_t)pid, 0) && errno == ESRCH; }

static bool read_note(const char *note, long *pid, unsigned long long *nonce) {
  int length = 0;
  /* NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): the widths keep the numbers in range */
  return sscanf(note, "%10ld-%16llx%n", pid, nonce, &length) == 2 && note[length] == '\0';
}

static void remove_if_dead(int folder, const char *note) {
  long pid;
  unsigned long long nonce;
  if (!read_note(note, &pid, &nonce) || !is_dead(pid)) return;
  char name[NAME_BYTES];
  names_write(nonce, name);
  if (shm_unlink(name) && errno != ENOENT) return;
  unlinkat(folder, note, 0);
}

static DIR *open_notes(void) {
  int folder = open_folder();
  DIR *notes = folder < 0 ? NULL : fdopendir(folder);
  if (!notes && folder >= 0) close(folder);
  return notes;
}

void names_remove_dead(void) {
  DIR *notes = open_notes();
  if (!notes) return;
  for (struct dirent *entry; (entry = readdir(notes));) remove_if_dead(dirfd(notes), entry->d_name);
  closedir(notes);
}

bool names_find(uint32_t (*number_of)(uint64_t nonce), uint32_t number, uint64_t *nonce) {
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
