#include "places.h"

#include "error.h"

#include <stdlib.h>
#include <string.h>

void places_init(struct places *places) {
  *places = (struct places){.issued = WIRE_START};
  atomic_init(&places->taken, 0);
}

uint32_t mlxdist_place_on_wire(uint64_t place) { return place_on_wire(place); }

void places_free(struct places *places) { free(places->ranges); }

static void remove_range(struct places *places, uint32_t i) {
  places->count--;
  memmove(&places->ranges[i], &places->ranges[i + 1], (places->count - i) * sizeof *places->ranges);
}

static int insert_range(struct places *places, uint32_t i, uint32_t place) {
  if (places->count == places->capacity) {
    uint32_t larger = places->capacity ? 2 * places->capacity : 8;
    struct place_range *grown = realloc(places->ranges, larger * sizeof *grown);
    if (!grown) return fail(MLXDIST_RESOURCES, "out of memory for the order of a group");
    places->ranges = grown;
    places->capacity = larger;
  }
  memmove(&places->ranges[i + 1], &places->ranges[i], (places->count - i) * sizeof *places->ranges);
  places->ranges[i] = (struct place_range){place, place};
  places->count++;
  return MLXDIST_OK;
}

/* The first range that begins behind the place. From the end: what is issued is mostly new. */
static uint32_t range_behind(const struct places *places, uint32_t place) {
  uint32_t i = places->count;
  while (i > 0 && !wire_at_least(place, places->ranges[i - 1].first)) i--;
  return i;
}

/* The ranges that the low end has reached. */
static void absorb(struct places *places) {
  while (places->count && places->ranges[0].first == places->issued + 1) {
    places->issued = places->ranges[0].last;
    remove_range(places, 0);
  }
}

int places_issue_early(struct places *places, uint32_t place) {
  if (place == places->issued + 1) {
    places->issued = place;
    absorb(places);
    return MLXDIST_OK;
  }
  uint32_t i = range_behind(places, place);
  bool follows = i > 0 && places->ranges[i - 1].last + 1 == place;
  bool precedes = i < places->count && places->ranges[i].first == place + 1;
  if (follows && precedes) {
    places->ranges[i - 1].last = places->ranges[i].last;
    remove_range(places, i);
  } else if (follows) {
    places->ranges[i - 1].last = place;
  } else if (precedes) {
    places->ranges[i].first = place;
  } else {
    return insert_range(places, i, place);
  }
  return MLXDIST_OK;
}

bool places_has_issued(const struct places *places, uint32_t place) {
  if (wire_at_least(places->issued, place)) return true;
  uint32_t i = range_behind(places, place);
  return i > 0 && wire_at_least(places->ranges[i - 1].last, place);
}
