/*
 * What the threads of this process do, as the kernel shows it, for finding ranks that wait for each other: a thread
 * that waits for another one of its process does not go on before that one does.
 */
#include "group.h"

#include <stdbool.h>

#ifdef __APPLE__
#include <dlfcn.h>
#include <mach/mach.h>
#include <string.h>

#ifdef __arm64__
/* Where a thread waits for another one: the calls of libsystem_kernel, and the arguments that are its limit (0: none).
 * Metal waits for an event in the last one. */
static const struct {
  const char *name;
  int limits[2];
} waits[] = {{"__psynch_cvwait", {6, 7}},         {"__psynch_mutexwait", {-1, -1}},
             {"__ulock_wait", {3, -1}},           {"__ulock_wait2", {3, -1}},
             {"semaphore_wait_trap", {-1, -1}},   {"semaphore_timedwait_trap", {1, 2}},
             {"iokit_user_client_trap", {-1, -1}}};

/* Of one that waits in the kernel: its registers are those of the call. */
static int32_t state_in_call(thread_t thread) {
  arm_thread_state64_t registers;
  mach_msg_type_number_t count = ARM_THREAD_STATE64_COUNT;
  if (thread_get_state(thread, ARM_THREAD_STATE64, (thread_state_t)&registers, &count)) return MLXDIST_THREAD_RUNS;
  Dl_info call;
  if (!dladdr((const void *)(uintptr_t)arm_thread_state64_get_pc(registers), &call) || !call.dli_sname)
    return MLXDIST_THREAD_OUTSIDE;
  for (size_t i = 0; i < sizeof waits / sizeof *waits; i++) {
    if (strcmp(call.dli_sname, waits[i].name)) continue;
    bool timed = false;
    for (int k = 0; k < 2; k++)
      if (waits[i].limits[k] >= 0 && registers.__x[waits[i].limits[k]]) timed = true;
    return timed ? MLXDIST_THREAD_TIMED : MLXDIST_THREAD_WAITS;
  }
  return MLXDIST_THREAD_OUTSIDE;
}
#else
static int32_t state_in_call(thread_t thread) {
  (void)thread;
  return MLXDIST_THREAD_OUTSIDE;
}
#endif

static bool look(thread_t thread, mlxdist_thread *found) {
  thread_identifier_info_data_t identity;
  thread_basic_info_data_t basic;
  mach_msg_type_number_t count = THREAD_IDENTIFIER_INFO_COUNT;
  if (thread_info(thread, THREAD_IDENTIFIER_INFO, (thread_info_t)&identity, &count)) return false;
  count = THREAD_BASIC_INFO_COUNT;
  if (thread_info(thread, THREAD_BASIC_INFO, (thread_info_t)&basic, &count)) return false;
  uint64_t us = (uint64_t)basic.user_time.microseconds + (uint64_t)basic.system_time.microseconds;
  us += ((uint64_t)basic.user_time.seconds + (uint64_t)basic.system_time.seconds) * 1000000u;
  bool waiting = basic.run_state == TH_STATE_WAITING;
  *found = (mlxdist_thread){identity.thread_id, us * 1000, waiting ? state_in_call(thread) : MLXDIST_THREAD_RUNS};
  return true;
}

static uint64_t list(mlxdist_thread *threads, uint64_t room) {
  thread_act_array_t all;
  mach_msg_type_number_t count;
  if (task_threads(mach_task_self(), &all, &count)) return UINT64_MAX;
  uint64_t n = 0;
  mlxdist_thread found;
  for (mach_msg_type_number_t i = 0; i < count; i++) {
    if (look(all[i], &found) && n++ < room) threads[n - 1] = found;
    mach_port_deallocate(mach_task_self(), all[i]);
  }
  vm_deallocate(mach_task_self(), (vm_address_t)all, count * sizeof *all);
  return n;
}

#else
#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* "202 0x7f95 0x189 0x0 0x0 ...": the call that a thread waits in and its arguments; else "running". A futex that other
 * processes share may be theirs to wake. */
static int32_t state_of(const char *text) {
  char *rest;
  unsigned long arguments[4]; /* address, operation, value, limit */
  long call = strtol(text, &rest, 10);
  if (rest == text || call < 0) return MLXDIST_THREAD_RUNS;
  if (call != SYS_futex) return MLXDIST_THREAD_OUTSIDE;
  for (int i = 0; i < 4; i++) arguments[i] = strtoul(rest, &rest, 16);
  unsigned long operation = arguments[1] & (unsigned long)FUTEX_CMD_MASK;
  bool waits = operation == FUTEX_WAIT || operation == FUTEX_WAIT_BITSET;
  if (!waits || !(arguments[1] & FUTEX_PRIVATE_FLAG)) return MLXDIST_THREAD_OUTSIDE;
  return arguments[3] ? MLXDIST_THREAD_TIMED : MLXDIST_THREAD_WAITS;
}

/* One that cannot be read may run. */
static int32_t read_state(long id) {
  char path[64], text[192];
  snprintf(path, sizeof path, "/proc/self/task/%ld/syscall", id);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return MLXDIST_THREAD_RUNS;
  ssize_t n = read(file, text, sizeof text - 1);
  close(file);
  text[n > 0 ? n : 0] = 0;
  return state_of(text);
}

static uint64_t run_ns(long id) {
  struct timespec time;
  clockid_t clock = (clockid_t)(~(unsigned)id << 3 | 6u); /* of the kernel's CPUCLOCK_PERTHREAD and CPUCLOCK_SCHED */
  if (clock_gettime(clock, &time)) return 0;
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static uint64_t list(mlxdist_thread *threads, uint64_t room) {
  DIR *directory = opendir("/proc/self/task");
  if (!directory) return UINT64_MAX;
  uint64_t n = 0;
  for (const struct dirent *entry; (entry = readdir(directory));) {
    long id = strtol(entry->d_name, 0, 10);
    if (id <= 0) continue;
    if (n < room) threads[n] = (mlxdist_thread){(uint64_t)id, run_ns(id), read_state(id)};
    n++;
  }
  closedir(directory);
  return n;
}
#endif

uint64_t mlxdist_threads(mlxdist_group *group, mlxdist_thread *threads, uint64_t room) {
  uint64_t own = atomic_load(&group->engine->progress_id);
  uint64_t n = list(threads, room), kept = 0;
  if (n > room) return UINT64_MAX;
  for (uint64_t i = 0; i < n; i++)
    if (threads[i].id != own) threads[kept++] = threads[i];
  return kept;
}
