#include "label.h"

#include "group.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The texts of this process, for errors: those of its peers are the same, as their programs are. */
#define TEXTS 16384u
#define TEXTS_KEPT (TEXTS / 2)

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
  uint64_t label;
  char *text;
} texts[TEXTS];
static uint32_t kept;

/* FNV-1a: the texts are a program's own. */
static uint64_t hash(const char *text) {
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  for (; *text; text++) hash = (hash ^ (uint8_t)*text) * UINT64_C(0x100000001b3);
  return (hash ^ hash >> LABEL_THREAD_SHIFT) & LABEL_TEXT_MASK;
}

static uint32_t find(uint64_t label) {
  uint32_t i = (uint32_t)label % TEXTS;
  while (texts[i].text && texts[i].label != label) i = (i + 1) % TEXTS;
  return i;
}

uint64_t mlxdist_label(const char *text) {
  if (!text || !*text) return 0;
  uint64_t label = hash(text);
  if (!label) label = 1;
  pthread_mutex_lock(&mutex);
  uint32_t i = find(label);
  if (!texts[i].text && kept < TEXTS_KEPT && (texts[i].text = strdup(text))) {
    texts[i].label = label;
    kept++;
  }
  pthread_mutex_unlock(&mutex);
  return label;
}

/* Adjoint to what is adjoint to an operation is that one again. */
#define ADJOINT (UINT64_C(1) << (LABEL_THREAD_SHIFT - 1))

uint64_t mlxdist_label_of_adjoint(uint64_t label) { return label ? label ^ ADJOINT : 0; }

static void name(uint64_t label, char *text, size_t bytes) {
  const char *own = texts[find(label)].text, *forward = own ? 0 : texts[find(label ^ ADJOINT)].text;
  const char *known = own ? own : forward ? forward : "one that is not called here";
  snprintf(text, bytes, " in %s%s", known, forward ? " backward" : "");
}

/* How long a thread lives, for the groups that have its number: the thread and each of these own it. */
struct thread_life {
  atomic_int owners;
  atomic_bool ended;
};

static pthread_key_t key;
static pthread_once_t key_made = PTHREAD_ONCE_INIT;
static _Thread_local struct thread_life *own_life;

static void release(struct thread_life *life) {
  if (life && atomic_fetch_sub(&life->owners, 1) == 1) free(life);
}

static mlxdist_group *numbered; /* those that know a thread, with the mutex */

/* What other destructors of the thread call gets a life of its own. */
static void end_thread(void *context) {
  struct thread_life *life = context;
  pthread_mutex_lock(&mutex);
  for (mlxdist_group *group = numbered; group; group = group->next_numbered)
    if (atomic_load(&group->threads[0].life) == life) group->first_thread = 0;
  atomic_store(&life->ended, true);
  pthread_mutex_unlock(&mutex);
  own_life = 0;
  release(life);
}

static void make_key(void) { (void)pthread_key_create(&key, end_thread); }

static struct thread_life *life_of_this_thread(void) {
  if (own_life) return own_life;
  (void)pthread_once(&key_made, make_key);
  struct thread_life *life = malloc(sizeof *life);
  if (!life) return 0;
  atomic_init(&life->owners, 1);
  atomic_init(&life->ended, false);
  (void)pthread_setspecific(key, life);
  return own_life = life;
}

/* With the mutex. Numbers are not used again, as entries are: when a thread ends is another moment on each rank. */
static uint32_t add_thread(mlxdist_group *group, struct thread_life *life) {
  uint32_t i = 0, known = group->thread_count, number = group->threads_seen + 1;
  while (i < known && !atomic_load(&group->threads[i].life->ended)) i++;
  if (number < LABEL_MAX_THREAD) group->threads_seen = number;
  if (i == GROUP_THREADS) return number;
  struct thread_life *before = i < known ? group->threads[i].life : 0;
  if (i == 0) group->first_thread = pthread_self();
  atomic_fetch_add(&life->owners, 1);
  group->threads[i].number = number;
  atomic_store(&group->threads[i].life, life);
  if (known == 0) {
    group->next_numbered = numbered;
    numbered = group;
  }
  if (i == known) atomic_store(&group->thread_count, known + 1);
  release(before);
  return number;
}

/* Its number in the order of first use, from 1. */
static uint32_t number_of_thread(mlxdist_group *group) {
  struct thread_life *life = life_of_this_thread();
  if (!life) return 1;
  uint32_t known = atomic_load_explicit(&group->thread_count, memory_order_acquire);
  for (uint32_t i = 0; i < known; i++)
    if (atomic_load_explicit(&group->threads[i].life, memory_order_acquire) == life) return group->threads[i].number;
  pthread_mutex_lock(&mutex);
  uint32_t number = add_thread(group, life);
  pthread_mutex_unlock(&mutex);
  return number;
}

void label_forget_threads(mlxdist_group *group) {
  pthread_mutex_lock(&mutex);
  mlxdist_group **link = &numbered;
  while (*link && *link != group) link = &(*link)->next_numbered;
  if (*link) *link = group->next_numbered;
  pthread_mutex_unlock(&mutex);
  for (uint32_t i = 0; i < group->thread_count; i++) release(group->threads[i].life);
}

uint64_t label_with_thread(mlxdist_group *group, uint64_t text, uint64_t place) {
  uint32_t number = number_of_thread(group);
  pthread_mutex_lock(&mutex);
  if (number != group->turn_thread) {
    group->turn_thread = number;
    group->turn_begin = place;
  }
  /* Of the collectives of other threads before this one's some are still in progress. */
  if (group->threads_seen > 1 &&
      atomic_load_explicit(&group->collectives_ended, memory_order_relaxed) < group->turn_begin - 1)
    group->threads_overlap = true;
  bool known = group->threads_overlap;
  pthread_mutex_unlock(&mutex);
  return (text & LABEL_TEXT_MASK) | (known ? (uint64_t)number << LABEL_THREAD_SHIFT : 0);
}

void label_describe(uint64_t label, char *text, size_t bytes) {
  uint64_t thread = label >> LABEL_THREAD_SHIFT;
  *text = '\0';
  pthread_mutex_lock(&mutex);
  if (label & LABEL_TEXT_MASK) name(label & LABEL_TEXT_MASK, text, bytes);
  pthread_mutex_unlock(&mutex);
  size_t used = strlen(text);
  if (thread) snprintf(text + used, bytes - used, " from thread %d of its group", (int)thread);
}
