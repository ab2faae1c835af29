/* Places against a plain list of flags: issued in any order, over the wrap of the numbers; and labels. */
#include "places.h"

#include "group.h"
#include "label.h"
#include "world.h"

#define COUNT 400

static void issue_in_order_of(uint32_t seed, uint32_t window) {
  struct places places;
  bool issued[COUNT] = {false};
  places_init(&places);
  for (int i = 0; i < COUNT; i++) REQUIRE(places_take(&places) == (uint64_t)i + 1);
  srand(seed);
  for (int left = COUNT, first = 0; left > 0; left--) {
    while (first < COUNT && issued[first]) first++;
    int i = first + rand() % (int)window;
    while (i >= COUNT || issued[i]) i = first + rand() % (int)window;
    issued[i] = true;
    REQUIRE(places_issue(&places, place_on_wire((uint64_t)i + 1)) == MLXDIST_OK);
    for (int k = 0; k < COUNT; k++) REQUIRE(places_has_issued(&places, place_on_wire((uint64_t)k + 1)) == issued[k]);
  }
  REQUIRE(places.count == 0);
  REQUIRE(places.issued == place_on_wire(COUNT));
  places_free(&places);
}

static void match_labels(void) {
  char text[128];
  uint64_t a = mlxdist_label("layers.0 #1"), b = mlxdist_label("layers.0 #2");
  uint64_t thread = UINT64_C(2) << LABEL_THREAD_SHIFT, other = UINT64_C(3) << LABEL_THREAD_SHIFT;
  REQUIRE(mlxdist_label("") == 0);
  REQUIRE(a != b && a == mlxdist_label("layers.0 #1"));
  REQUIRE(!label_matches(a, b) && label_matches(a, a) && label_matches(a, 0) && label_matches(0, b));
  REQUIRE(!label_matches(a | thread, a | other) && label_matches(a | thread, a) && label_matches(thread, a));
  REQUIRE(!label_matches(a, mlxdist_label_of_adjoint(a)));
  REQUIRE(mlxdist_label_of_adjoint(mlxdist_label_of_adjoint(a)) == a);
  label_describe(mlxdist_label_of_adjoint(a) | thread, text, sizeof text);
  REQUIRE(!strcmp(text, " in layers.0 #1 backward from thread 2 of its group"));
}

/* Two threads whose collectives overlap, after one that has ended and left its id to the first of them, as the system
 * likes to do: the three have numbers of their own. */
static mlxdist_group group;
static uint64_t labels[3];
static _Atomic int turn = 1;

static void *call_once(void *context) {
  labels[0] = label_of_call(&group, 7, 1);
  return context;
}

static void *call_twice(void *context) {
  int who = *(int *)context;
  for (int place = 2 + who; place < 6 + who; place += 2) {
    while (turn != place - 2) sched_yield();
    labels[who] = label_of_call(&group, 7, (uint64_t)place);
    turn++;
  }
  return 0;
}

static void number_threads(void) {
  int who[] = {0, 1, 2};
  pthread_t threads[3];
  REQUIRE(pthread_create(&threads[0], 0, call_once, 0) == 0);
  pthread_join(threads[0], 0);
  for (int i = 1; i < 3; i++) REQUIRE(pthread_create(&threads[i], 0, call_twice, &who[i]) == 0);
  for (int i = 1; i < 3; i++) pthread_join(threads[i], 0);
  REQUIRE(labels[0] == 7);
  REQUIRE(labels[1] == (UINT64_C(2) << LABEL_THREAD_SHIFT | 7) && labels[2] == (UINT64_C(3) << LABEL_THREAD_SHIFT | 7));
  label_forget_threads(&group);
}

int main(void) {
  for (uint32_t seed = 0; seed < 20; seed++) issue_in_order_of(seed, 1 + seed * 7 % 100);
  match_labels();
  number_threads();
  printf("places_test passed\n");
  return 0;
}
