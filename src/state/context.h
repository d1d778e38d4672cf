/* The context that is stored with a checkpoint. */
#ifndef STATE_CONTEXT_H
#define STATE_CONTEXT_H

#include "strategy/strategy.h"

/* The run file of a module: its model as it was given, its strategy, its precision, its ranks. *text: free. */
loom_status loom__parallel_context(const loom_parallel *parallel, char **text, size_t *length);
/* The sections of a configuration that a context has. */
loom_status loom__context_text(const loom_run_config *config, char **text, size_t *length);

#endif
