/* Megaloom: Megatron-style model parallelism inside your own training loop. This header brings in the whole public API;
 * each of those below can be included alone. Start reading at strategy.h, then rank.h. */
#ifndef MEGALOOM_MEGALOOM_H
#define MEGALOOM_MEGALOOM_H

#include <megaloom/callbacks.h>
#include <megaloom/comm.h>
#include <megaloom/config.h>
#include <megaloom/data.h>
#include <megaloom/kernels.h>
#include <megaloom/layout.h>
#include <megaloom/model.h>
#include <megaloom/module.h>
#include <megaloom/optim.h>
#include <megaloom/rank.h>
#include <megaloom/report.h>
#include <megaloom/safetensors.h>
#include <megaloom/status.h>
#include <megaloom/strategy.h>
#include <megaloom/team.h>
#include <megaloom/tensor.h>
#include <megaloom/types.h>

#endif
