/* Places against a plain list of flags: issued in any order, over the wrap of the numbers; and labels. */
#include "places.h"

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

int main(void) {
  for (uint32_t seed = 0; seed < 20; seed++) issue_in_order_of(seed, 1 + seed * 7 % 100);
  match_labels();
  printf("places_test passed\n");
  return 0;
}
