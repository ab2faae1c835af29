#include "providers.h"

#include "../verbs/library.h"

#include <stdio.h>
#include <string.h>

const struct verbs *verbs_provider(const char *name, const char *soft_profile, char *why, size_t bytes) {
  if (strcmp(name, "soft") != 0) return verbs_library(name, why, bytes);
  const struct verbs *soft = verbs_soft_profile(soft_profile);
  if (!soft)
    snprintf(why, bytes,
             "there is no soft profile %s; there are ideal, apple-tb5, apple-tb5-26.2, apple-tb5-27, apple-odd "
             "and rxe (MLXDIST_SOFT_PROFILE)",
             soft_profile);
  return soft;
}
