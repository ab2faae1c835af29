#define _GNU_SOURCE 1
#include "thread.h"

#ifdef __APPLE__
#include <mach/mach_init.h>
#include <mach/mach_traps.h>
#include <mach/thread_switch.h>
#include <pthread.h>
#include <pthread/qos.h>
#include <unistd.h>

/* sched_yield is swtch_pri: it lowers the thread's priority to the least for up to 10 ms. This one keeps it. */
void thread_yield(void) { thread_switch(MACH_PORT_NULL, SWITCH_OPTION_NONE, 0); }

/* With the default class it may wake up on an efficiency core. Fails only where the program has set a scheduling policy
 * of its own, which then counts. */
void thread_for_polling(void) { (void)pthread_set_qos_class_self_np(QOS_CLASS_USER_INTERACTIVE, 0); }

uint64_t thread_id(void) {
  uint64_t id = 0;
  (void)pthread_threadid_np(0, &id);
  return id;
}

/* A thread may run on all. */
struct thread_cores thread_cores(void) {
  struct thread_cores cores = {0};
  for (long core = 0; core < sysconf(_SC_NPROCESSORS_ONLN) && core < THREAD_CORES; core++)
    cores.words[core / 64] |= UINT64_C(1) << core % 64;
  return cores;
}

int thread_keep_on(const struct thread_cores *cores) {
  (void)cores;
  return 0;
}

#else
#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

void thread_yield(void) { sched_yield(); }

void thread_for_polling(void) {}

uint64_t thread_id(void) { return (uint64_t)syscall(SYS_gettid); }

struct thread_cores thread_cores(void) {
  struct thread_cores cores;
  cpu_set_t allowed;
  _Static_assert(sizeof cores == sizeof allowed, "as many as cpu_set_t has room for");
  /* It fails where there are more: no rank lacks one there. */
  if (sched_getaffinity(0, sizeof allowed, &allowed)) memset(&allowed, 0xff, sizeof allowed);
  memcpy(&cores, &allowed, sizeof cores);
  return cores;
}

int thread_keep_on(const struct thread_cores *cores) {
  cpu_set_t allowed;
  memcpy(&allowed, cores, sizeof allowed);
  return sched_setaffinity(0, sizeof allowed, &allowed) ? errno : 0;
}
#endif
