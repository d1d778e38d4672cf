/* The commands of `megaloom`, and what they share. Each command takes its own argv (argv[0] is "megaloom <name>") and
 * returns the exit status: 0, 1 for a failure, 2 for a usage, configuration or input that is wrong. */
#ifndef CLI_COMMANDS_H
#define CLI_COMMANDS_H

#include <argp.h>
#include <megaloom/megaloom.h>

int loom_cli_checkpoint(int argc, char **argv);
int loom_cli_check_layout(int argc, char **argv);
int loom_cli_compare(int argc, char **argv);
int loom_cli_config(int argc, char **argv);
int loom_cli_data(int argc, char **argv);
int loom_cli_describe(int argc, char **argv);
int loom_cli_eval(int argc, char **argv);
int loom_cli_export(int argc, char **argv);
int loom_cli_generate(int argc, char **argv);
int loom_cli_report(int argc, char **argv);
int loom_cli_plan(int argc, char **argv);
int loom_cli_schedule(int argc, char **argv);
int loom_cli_lr(int argc, char **argv);
int loom_cli_tokenizer(int argc, char **argv);
int loom_cli_topology(int argc, char **argv);
int loom_cli_train(int argc, char **argv);

/* The arguments that describe a run: at most one run file, and FIELD=VALUE overrides in order; all borrowed from argv.
 */
typedef struct loom_cli_run_arguments {
    const char *path; /* NULL = no file */
    const char **overrides;
    int64_t override_count;
} loom_cli_run_arguments;
/* Room for argc overrides; loom_cli_run_arguments_free. */
loom_status loom_cli_run_arguments_create(int argc, loom_cli_run_arguments *arguments);
void loom_cli_run_arguments_free(loom_cli_run_arguments *arguments);
/* Takes one argument in; a second file is a usage error. */
void loom_cli_run_argument(loom_cli_run_arguments *arguments, char *text, const struct argp_state *state);

/* Where a command's model comes from: --hf or --checkpoint, one of which must be given; borrowed from argv. */
typedef struct loom_cli_model_source {
    const char *hf, *checkpoint;
} loom_cli_model_source;
enum { LOOM_CLI_KEY_CHECKPOINT = 512 };
#define LOOM_CLI_MODEL_OPTIONS                                                                                         \
    {"hf", 'm', "DIR", 0, "Hugging Face directory of the model", 0}, {                                                 \
        "checkpoint", LOOM_CLI_KEY_CHECKPOINT, "DIR", 0, "Checkpoint of the model, whose context says what it is", 0   \
    }
/* Takes one of these options in; ARGP_ERR_UNKNOWN for another. */
error_t loom_cli_take_model(loom_cli_model_source *source, int key, const char *text);
/* A usage error unless one of the two is given. */
void loom_cli_model_source_check(const loom_cli_model_source *source, const struct argp_state *state);
/* The override model.hf='DIRECTORY', or model.from. Between single quotes YAML takes no path for null or a number; a
 * quote inside is doubled. */
loom_status loom_cli_model_override(const loom_cli_model_source *source, char *text, size_t bytes);
/* Fills a model.vocab_size that the context of model.from does not tell from the checkpoint's tensors. */
loom_status loom_cli_complete_model(loom_run_config *config);

/* The rank that the launcher gave this process; 0 without a launcher. What is said once is said by 0. */
int loom_cli_process(void);
/* 0 for LOOM_OK, 2 where what the user gave is wrong, 1 for other failures. */
int loom_cli_exit_status(loom_status status);
/* Prints "megaloom: " and each line of the recorded error on standard error, and gives the exit status. */
int loom_cli_fail(loom_status status);
/* Prints "megaloom: " and the message, of a usage that is wrong, on standard error, and sets *failed. */
void loom_cli_complain(bool *failed, const char *format, ...) LOOM_PRINTF(2, 3);
/* The integer that an option was given, from `least` to `most`; another text is a usage error. INT64_MIN and INT64_MAX:
 * no such limit. */
int64_t loom_cli_integer(
    const char *option, const char *text, int64_t least, int64_t most, const struct argp_state *state);
/* Bytes of "2GB", "512MiB", "70000"; -1 where the text is none. */
int64_t loom_cli_read_bytes(const char *text);
/* Writes a line of the library's log to standard error. */
void loom_cli_log(void *context, loom_log_level level, const char *line);

/* Opens data.tokenizer where data.kind has tokens of one, fills a model.vocab_size that is not given, and refuses one
 * that has no row for each of its tokens. The byte tokenizer is also what a run file has that says nothing of its
 * tokens: then the vocabulary alone tells how many there are. *tokenizer is left as it is for the other kinds. */
loom_status loom_cli_open_tokenizer(loom_run_config *config, loom_tokenizer **tokenizer);

/* Checks the configuration for the ranks that are there, runs the function on them (MPI processes when a launcher
 * started us, else config->ranks threads), prints what failed, and gives the exit status. Does not return when a thread
 * rank is stuck. */
int loom_cli_run(const loom_run_config *config, loom_rank_function function, void *argument);

/* From now on a file that is shortened while the library has it mapped ends the process by SIGBUS with a message that
 * names the file, the byte and, under a launcher, the rank. */
void loom_cli_name_shortened_files(void);

/* The field that lets a rank route by its own tokens alone (a capacity, or sinkhorn), so that ranks which share tokens
 * out over tensor and context route otherwise than one rank does; NULL = none. Without an architecture: NULL. */
const char *loom_cli_routes_by_rank(const loom_run_config *config);

/* What makes a step another computation where another number of data-parallel ranks shares its samples out, in words;
 * NULL = nothing, it is the same but for rounding. */
const char *loom_cli_goes_by_data_ranks(const loom_run_config *config);

/* Of that many ranks, which the sizes of the strategy divide. */
int64_t loom_cli_data_parallel_size(const loom_run_config *config, int64_t ranks);

/* Makes the directory and those above it, where they are not there yet. */
loom_status loom_cli_make_directories(const char *path);

/* Processes that were given different run files would train on with different numbers: an error on all ranks that names
 * the first line in which a rank's file differs from that of rank 0. Collective over the world. */
loom_status loom_cli_check_same(loom_rank *rank, const loom_run_config *config);

/* The strategy, launched, as the run file wants it. */
loom_status loom_cli_fabric(loom_rank *rank, const loom_run_config *config, loom_fabric **fabric);
/* The model of the run file, set up, with memory for gradients where they are wanted. */
loom_status loom_cli_model(
    loom_fabric *fabric, const loom_run_config *config, bool gradients, loom_parallel **parallel);

#endif
