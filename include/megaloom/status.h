/* Status codes and the error record: how every Megaloom function reports failure.
 *
 * A function that can fail returns a loom_status: 0 (LOOM_OK) or a negative code. Its outputs come last and are set
 * only on success. The first function to detect an error writes one message (what, where, found, expected, nearest
 * legal value) into the calling thread's error record; callers pass the status on with LOOM_TRY and do not write again.
 * The library never exits and never prints. */
#ifndef MEGALOOM_STATUS_H
#define MEGALOOM_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

#define LOOM_API __attribute__((visibility("default")))
#define LOOM_PRINTF(text, first) __attribute__((format(printf, text, first)))

/* X(name, value, text): every status there is. */
#define LOOM_STATUS_LIST(X)                                                                                            \
    X(OK, 0, "success")                                                                                                \
    X(ERR_ARGUMENT, -1, "an argument is not valid")                                                                    \
    X(ERR_CONFIG, -2, "the configuration is not valid")                                                                \
    X(ERR_UNSUPPORTED, -3, "not supported yet")                                                                        \
    X(ERR_MEMORY, -4, "out of memory")                                                                                 \
    X(ERR_IO, -5, "input or output failed")                                                                            \
    X(ERR_FORMAT, -6, "a file does not have the form it must have")                                                    \
    X(ERR_NOT_FOUND, -7, "not found")                                                                                  \
    X(ERR_STATE, -8, "called at the wrong time")                                                                       \
    X(ERR_COMM, -9, "communication failed")                                                                            \
    X(ERR_TIMEOUT, -10, "a wait took longer than its limit")                                                           \
    X(ERR_ABORTED, -11, "another rank failed")                                                                         \
    X(ERR_STUCK, -12, "a rank did not come back")                                                                      \
    X(ERR_NUMERIC, -13, "a value is NaN or infinite")                                                                  \
    X(ERR_INTERNAL, -14, "a fault of Megaloom itself")                                                                 \
    X(END, -15, "no more items")

typedef enum loom_status {
#define LOOM_STATUS_ENUM(name, value, text) LOOM_##name = value,
    LOOM_STATUS_LIST(LOOM_STATUS_ENUM)
#undef LOOM_STATUS_ENUM
} loom_status;

/* "LOOM_ERR_IO" for LOOM_ERR_IO; "unknown status" for a number that is none. Never NULL. */
LOOM_API const char *loom_status_name(loom_status status);
/* One plain sentence part for the code, as in LOOM_STATUS_LIST. Never NULL. */
LOOM_API const char *loom_status_text(loom_status status);

/* The message of the last error that this thread recorded; "" when there is none. Valid until the thread's next error.
 */
LOOM_API const char *loom_error_message(void);
/* Empties this thread's error record. */
LOOM_API void loom_error_clear(void);

/* Writes the message into this thread's error record and returns `status`, so that a detector can say
 * `return loom_fail(LOOM_ERR_ARGUMENT, "…", …)`. For user-defined ops, callbacks and backends as well. */
LOOM_API loom_status loom_fail(loom_status status, const char *format, ...) LOOM_PRINTF(2, 3);
/* Puts text before the recorded message ("reading run.yaml: " + message) and returns `status` unchanged. */
LOOM_API loom_status loom_fail_context(loom_status status, const char *format, ...) LOOM_PRINTF(2, 3);

/* Returns from the enclosing function with the status of `call` unless it is LOOM_OK. */
#define LOOM_TRY(call)                                                                                                 \
    do {                                                                                                               \
        loom_status loom_try_status_ = (call);                                                                         \
        if (loom_try_status_ != LOOM_OK)                                                                               \
            return loom_try_status_;                                                                                   \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
