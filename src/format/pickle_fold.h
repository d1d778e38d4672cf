/* Calls in a pickle that stand for plain data. */
#ifndef FORMAT_PICKLE_FOLD_H
#define FORMAT_PICKLE_FOLD_H

#include "format/pickle.h"

/* The name of the object that a persistent id becomes; its one argument is the id. No module has such a name. */
#define LOOM__PERSISTENT "persistent id"

/* *made = what the call of `name` stands for; left alone where it is no call of the list. */
loom_status loom__fold_call(loom_value_pool *pool, const char *name, const loom_value *arguments, loom_value **made);
/* torch._utils._rebuild_tensor_v2. */
loom_status loom__fold_tensor(const char *what, loom_value_pool *pool, const loom_value *arguments,
    loom__pickled_tensor *tensor, loom_value **made);

#endif
