/* Faults on purpose: see faults.h. */
#include "faults.h"

#include <errno.h>
#include <string.h>

/* A decimal number below 2^32 at *text, which then stands behind it. */
static bool read_number(const char **text, uint32_t *number) {
  uint64_t value = 0;
  const char *digit = *text;
  for (; *digit >= '0' && *digit <= '9'; digit++) {
    value = value * 10 + (uint64_t)(*digit - '0');
    if (value > UINT32_MAX) return false;
  }
  if (digit == *text) return false;
  *number = (uint32_t)value;
  *text = digit;
  return true;
}

static bool read_chance(const char **text, struct soft_chance *chance) {
  if (!read_number(text, &chance->times) || *(*text)++ != '/') return false;
  return read_number(text, &chance->of) && chance->of > 0 && chance->times <= chance->of;
}

/* Whether `name` stands at *text, which then stands behind it. */
static bool read_name(const char **text, const char *name) {
  size_t length = strlen(name);
  if (strncmp(*text, name, length) != 0) return false;
  *text += length;
  return true;
}

static bool read_fault(const char **text, struct soft_faults *faults) {
  if (read_name(text, "drop=")) return read_chance(text, &faults->drop);
  if (read_name(text, "duplicate=")) return read_chance(text, &faults->duplicate);
  if (read_name(text, "drop_next=")) return read_number(text, &faults->drop_next);
  if (read_name(text, "drop_after=")) return read_number(text, &faults->drop_after);
  if (read_name(text, "seed=")) {
    uint32_t seed;
    if (!read_number(text, &seed)) return false;
    faults->generator = seed;
    return true;
  }
  if (!read_name(text, "none")) return false;
  *faults = (struct soft_faults){.generator = faults->generator};
  return true;
}

static void note_any(struct soft_faults *faults) {
  faults->any = faults->drop.times || faults->duplicate.times || faults->drop_next || faults->drop_after;
}

int soft_faults_set(struct soft_faults *faults, const char *list) {
  if (!list) return EINVAL;
  struct soft_faults changed = *faults;
  do {
    if (!read_fault(&list, &changed)) return EINVAL;
  } while (*list == ',' && list++);
  if (*list) return EINVAL;
  note_any(&changed);
  *faults = changed;
  return 0;
}

/* splitmix64: every seed, 0 included, gives another good sequence. */
static uint64_t draw(uint64_t *generator) {
  uint64_t z = *generator += UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

static bool happens(struct soft_faults *faults, struct soft_chance chance) {
  return chance.times && draw(&faults->generator) % chance.of < chance.times;
}

/* Every fault sees every SEND, also one that another fault has lost already. */
enum soft_fault soft_faults_next(struct soft_faults *faults) {
  bool drop = happens(faults, faults->drop);
  bool duplicate = happens(faults, faults->duplicate);
  if (faults->drop_next) {
    faults->drop_next--;
    drop = true;
  }
  if (faults->drop_after && --faults->drop_after == 0) drop = true;
  note_any(faults);
  return drop ? SOFT_FAULT_DROP : duplicate ? SOFT_FAULT_DUPLICATE : SOFT_FAULT_NONE;
}
