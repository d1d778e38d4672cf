/* What the pickle reader needs of a pool beyond <megaloom/value.h>. */
#ifndef FORMAT_VALUE_H
#define FORMAT_VALUE_H

#include <megaloom/value.h>

/* Memory of the pool, aligned to 16 bytes, not cleared. */
loom_status loom__value_allocate(loom_value_pool *pool, size_t bytes, void **memory);
/* A value of the kind with nothing in it. */
loom_status loom__value_create(loom_value_pool *pool, loom_value_kind kind, loom_value **value);
/* TEXT, BYTES or NAME of a copy of these bytes. */
loom_status loom__value_text_of(
    loom_value_pool *pool, loom_value_kind kind, const void *text, size_t bytes, loom_value **value);

#endif
