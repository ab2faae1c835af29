#include "debug.h"

#include "error.h"
#include "mlxdist.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES 2048
#define MAX_SUBSYSTEMS 256

atomic_int debug_level = DEBUG_WARN;

static struct {
  pthread_mutex_t lock;
  int file;                        /* -1 until one is opened: standard error */
  int rank;                        /* -1 until one is known */
  char subsystems[MAX_SUBSYSTEMS]; /* ",flight,link,"; empty for all */
} output = {PTHREAD_MUTEX_INITIALIZER, -1, -1, ""};

static const char *const names[] = {"off", "warn", "info", "trace"};

/* Warnings are for everybody; what is more is for the subsystems that were named. */
static bool is_wanted(enum debug_level level, const char *subsystem) {
  char name[64];
  snprintf(name, sizeof name, ",%s,", subsystem);
  return level <= DEBUG_WARN || !output.subsystems[0] || strstr(output.subsystems, name);
}

/* A thread that was writing does not exist in a forked child, and would have kept the lock for ever. */
static void unlock_in_child(void) { (void)pthread_mutex_init(&output.lock, 0); }

static void watch_forks(void) { (void)pthread_atfork(0, 0, unlock_in_child); }

/* What is the same for all lines, read at once: another thread may open a file meanwhile. */
static bool read_output(enum debug_level level, const char *subsystem, int *rank) {
  static pthread_once_t watched = PTHREAD_ONCE_INIT;
  (void)pthread_once(&watched, watch_forks);
  pthread_mutex_lock(&output.lock);
  bool wanted = is_wanted(level, subsystem);
  *rank = output.rank;
  pthread_mutex_unlock(&output.lock);
  return wanted;
}

void debug_write(enum debug_level level, const char *subsystem, const char *format, ...) {
  int rank;
  if (!read_output(level, subsystem, &rank)) return;
  char line[LINE_BYTES];
  struct timespec now;
  struct tm local;
  clock_gettime(CLOCK_REALTIME, &now);
  localtime_r(&now.tv_sec, &local);
  int length = snprintf(line, sizeof line, "%02d:%02d:%02d.%06ld mlxdist rank %d pid %d %s %s: ", local.tm_hour,
                        local.tm_min, local.tm_sec, now.tv_nsec / 1000, rank, (int)getpid(), names[level], subsystem);
  va_list arguments;
  va_start(arguments, format);
  int more = vsnprintf(line + length, sizeof line - (size_t)length - 1, format, arguments);
  va_end(arguments);
  length += more;
  if (length > LINE_BYTES - 2) length = LINE_BYTES - 2;
  line[length++] = '\n';
  /* One write, to a file opened for appending: lines of several processes do not mix. A full disk is no reason to
   * stop. With the lock: who opens another file closes this one, and its number may soon be that of any other. */
  pthread_mutex_lock(&output.lock);
  ssize_t written = write(output.file >= 0 ? output.file : STDERR_FILENO, line, (size_t)length);
  pthread_mutex_unlock(&output.lock);
  (void)written;
}

/* "warn", "info", "trace", "off"; behind a colon the subsystems that say more than warnings. */
static int read_level(const char *spec, const char **subsystems) {
  size_t length = strcspn(spec, ":");
  *subsystems = spec[length] == ':' ? spec + length + 1 : "";
  for (int level = DEBUG_OFF; level <= DEBUG_TRACE; level++)
    if (strlen(names[level]) == length && strncmp(names[level], spec, length) == 0) return level;
  return -1;
}

int mlxdist_debug_open(const char *spec, int file, int32_t rank) {
  const char *subsystems = "";
  int level = spec ? read_level(spec, &subsystems) : DEBUG_WARN;
  if (level < 0 || strlen(subsystems) > MAX_SUBSYSTEMS - 3)
    return fail(MLXDIST_INVALID_ARGUMENT,
                "debug output \"%s\": must be off, warn, info or trace, and may go on with a "
                "colon and the subsystems that are wanted, such as trace:link,connection",
                spec);
  int copy = file >= 0 ? fcntl(file, F_DUPFD_CLOEXEC, 0) : -1;
  if (file >= 0 && copy < 0)
    return fail(MLXDIST_INVALID_ARGUMENT, "descriptor %d cannot be written for debug output: %s", file,
                strerror(errno));
  pthread_mutex_lock(&output.lock);
  if (output.file >= 0) close(output.file);
  output.file = copy;
  output.rank = rank;
  output.subsystems[0] = 0;
  if (subsystems[0]) snprintf(output.subsystems, sizeof output.subsystems, ",%s,", subsystems);
  pthread_mutex_unlock(&output.lock);
  atomic_store_explicit(&debug_level, level, memory_order_relaxed);
  return MLXDIST_OK;
}
