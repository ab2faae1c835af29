/* Faults on purpose: see fault_injection.h. */
#include "fault_injection.h"

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

static bool read_chance(const char **text, struct soft_rule *rule) {
  if (!read_number(text, &rule->times) || *(*text)++ != '/') return false;
  return read_number(text, &rule->of) && rule->of > 0 && rule->times <= rule->of;
}

/* Whether `name` stands at *text, which then stands behind it. */
static bool read_name(const char **text, const char *name) {
  size_t length = strlen(name);
  if (strncmp(*text, name, length) != 0) return false;
  *text += length;
  return true;
}

static bool read_rule(const char **text, struct soft_rule *rule) {
  if (read_name(text, "=")) return read_chance(text, rule);
  if (read_name(text, "_next=")) return read_number(text, &rule->next);
  return read_name(text, "_after=") && read_number(text, &rule->after);
}

static bool read_switch(const char **text, const char *on, const char *off, bool *state) {
  *state = read_name(text, on);
  return *state || read_name(text, off);
}

static bool read_seed(const char **text, uint64_t *generator) {
  uint32_t seed;
  if (!read_number(text, &seed)) return false;
  *generator = seed;
  return true;
}

static bool read_fault(const char **text, struct soft_faults *faults) {
  static const char *const kinds[SOFT_RULES] = {
      [SOFT_FAULT_DROP] = "drop",       [SOFT_FAULT_DUPLICATE] = "duplicate", [SOFT_FAULT_TRUNCATE] = "truncate",
      [SOFT_FAULT_CORRUPT] = "corrupt", [SOFT_FAULT_ERROR] = "error",         [SOFT_FAULT_DIE] = "die",
      [SOFT_FAULT_LOSE] = "lose",
  };
  for (int kind = 0; kind < SOFT_RULES; kind++)
    if (read_name(text, kinds[kind])) return read_rule(text, &faults->rules[kind]);
  if (read_name(text, "delay=")) return read_number(text, &faults->delay_us);
  if (read_name(text, "jitter=")) return read_number(text, &faults->jitter_us);
  if (read_name(text, "idle=")) return read_number(text, &faults->idle_ms);
  if (read_name(text, "link=")) return read_switch(text, "down", "up", &faults->link_down);
  if (read_name(text, "bridge=")) return read_switch(text, "on", "off", &faults->bridged);
  if (read_name(text, "seed=")) return read_seed(text, &faults->generator);
  if (!read_name(text, "none")) return false;
  *faults = (struct soft_faults){.generator = faults->generator};
  return true;
}

static void note_any(struct soft_faults *faults) {
  faults->any = faults->link_down || faults->delay_us || faults->jitter_us || faults->idle_ms;
  for (int kind = 0; kind < SOFT_RULES; kind++) {
    const struct soft_rule *rule = &faults->rules[kind];
    faults->any |= rule->times || rule->next || rule->after;
  }
}

int soft_faults_set(struct soft_faults *faults, const char *list) {
  if (!list) return EINVAL;
  struct soft_faults changed = *faults;
  do {
    if (!read_fault(&list, &changed)) return EINVAL;
  } while (*list++ == ',');
  if (list[-1]) return EINVAL;
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

uint64_t soft_faults_draw(struct soft_faults *faults, uint64_t limit) { return draw(&faults->generator) % limit; }

static bool happens(struct soft_faults *faults, struct soft_rule *rule) {
  bool hit = rule->times && soft_faults_draw(faults, rule->of) < rule->times;
  if (rule->next) {
    rule->next--;
    hit = true;
  }
  if (!rule->after) return hit;
  rule->after--;
  return rule->after == 0 || hit;
}

/* Every fault sees every SEND, also one that another fault has lost already. */
unsigned soft_faults_next(struct soft_faults *faults) {
  unsigned hits = faults->link_down ? 1u << SOFT_FAULT_DROP : 0;
  for (int kind = 0; kind < SOFT_FAULTS; kind++)
    if (happens(faults, &faults->rules[kind])) hits |= 1u << kind;
  note_any(faults);
  return hits;
}

bool soft_faults_lose_completion(struct soft_faults *faults) {
  bool hit = happens(faults, &faults->rules[SOFT_FAULT_LOSE]);
  note_any(faults);
  return hit;
}

uint64_t soft_faults_late_ns(struct soft_faults *faults) {
  uint64_t jitter = faults->jitter_us ? soft_faults_draw(faults, faults->jitter_us + UINT64_C(1)) : 0;
  return (faults->delay_us + jitter) * 1000;
}
