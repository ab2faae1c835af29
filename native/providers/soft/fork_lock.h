/* A lock that is free in a child of fork(): the fork waits for it, and the child calls `forget` to drop what belongs to
 * the parent. One in a file, whose functions take it with lock_list() and release it with unlock_list(). */
#pragma once

#include <pthread.h>

#define FORK_LOCK(forget)                                                                          \
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;                                         \
  static pthread_once_t once = PTHREAD_ONCE_INIT;                                                  \
  static void unlock_list(void) { pthread_mutex_unlock(&lock); }                                   \
  static void before_fork(void) { pthread_mutex_lock(&lock); }                                     \
  static void after_fork_in_child(void) {                                                          \
    forget();                                                                                      \
    unlock_list();                                                                                 \
  }                                                                                                \
  static void watch_forks(void) { pthread_atfork(before_fork, unlock_list, after_fork_in_child); } \
  static void lock_list(void) {                                                                    \
    pthread_once(&once, watch_forks);                                                              \
    pthread_mutex_lock(&lock);                                                                     \
  }
