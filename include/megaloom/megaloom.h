/* Megaloom: Megatron-style model parallelism inside your own training loop. This header brings in the whole public API;
 * each of those below can be included alone. In the order in which one meets them:
 *
 *   status, types      how a function fails; element types
 *   rank               loom_run_local, loom_run_mpi: a function on n ranks
 *   strategy           the fabric, setting up, steps: the training loop's side. config, model: what it is given
 *   generate           text from a model
 *   data               datasets, samplers, loaders, batches
 *   optim, callbacks   the optimizer; the eight events of a step
 *   module, tensor     bringing one's own model and operations
 *   comm, layout       groups and collectives; who is in which group
 *   stages, schedule   how a model is cut over a pipeline; what each stage does in which order
 *   timeline           the same drawn, planned or measured
 *   kernels, team      the mathematics on raw arrays; compute threads
 *   safetensors, huggingface, report  files; a trained model as a directory; progress line and metrics
 *   run                the folder of a run read back: its page, who is where as a picture, two runs compared
 *   checkpoint, value  sharded checkpoints as files: what is in them; plain data as Python's pickle has it
 *   checkpoint_io      who turns a state into those files and back, and wrappers around it
 *   plan               memory, traffic and time of a run before it starts; layouts that fit
 *   checkpoint_tools, load_model  checkpoints rewritten without ranks; a model from what is on the disk alone
 *   router             what the routers of a model with experts decide
 *   profile            where the time goes, operation by operation
 *   names              the nearest of the names there are to one that is not */
#ifndef MEGALOOM_MEGALOOM_H
#define MEGALOOM_MEGALOOM_H

#include <megaloom/callbacks.h>
#include <megaloom/checkpoint.h>
#include <megaloom/checkpoint_io.h>
#include <megaloom/checkpoint_tools.h>
#include <megaloom/comm.h>
#include <megaloom/config.h>
#include <megaloom/data.h>
#include <megaloom/generate.h>
#include <megaloom/huggingface.h>
#include <megaloom/kernels.h>
#include <megaloom/layout.h>
#include <megaloom/load_model.h>
#include <megaloom/model.h>
#include <megaloom/module.h>
#include <megaloom/names.h>
#include <megaloom/optim.h>
#include <megaloom/plan.h>
#include <megaloom/profile.h>
#include <megaloom/rank.h>
#include <megaloom/report.h>
#include <megaloom/router.h>
#include <megaloom/run.h>
#include <megaloom/safetensors.h>
#include <megaloom/schedule.h>
#include <megaloom/stages.h>
#include <megaloom/state.h>
#include <megaloom/status.h>
#include <megaloom/strategy.h>
#include <megaloom/team.h>
#include <megaloom/tensor.h>
#include <megaloom/timeline.h>
#include <megaloom/types.h>
#include <megaloom/value.h>

#endif
