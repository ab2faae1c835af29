#include "thread.h"

#include <time.h>

#ifdef __APPLE__
#include <mach/mach_init.h>
#include <mach/mach_traps.h>
#include <mach/thread_switch.h>
#include <pthread.h>
#include <pthread/qos.h>

/* CLOCK_MONOTONIC has steps of a microsecond there, and goes on while the Mac sleeps. */
uint64_t clock_ns(void) { return clock_gettime_nsec_np(CLOCK_UPTIME_RAW); }

/* sched_yield is swtch_pri: it lowers the thread's priority to the least for up to 10 ms. This one keeps it. */
void thread_yield(void) { thread_switch(MACH_PORT_NULL, SWITCH_OPTION_NONE, 0); }

/* With the default class it may wake up on an efficiency core. Fails only where the program has set a scheduling policy
 * of its own, which then counts. */
void thread_for_polling(void) { (void)pthread_set_qos_class_self_np(QOS_CLASS_USER_INTERACTIVE, 0); }

#else
#include <sched.h>

/* On Linux it stands still while the machine is suspended. */
uint64_t clock_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void thread_yield(void) { sched_yield(); }

void thread_for_polling(void) {}
#endif
