/* Threads that share the blocks of one product or one attention call.
 *
 * OpenMP's parallel region ends when every thread has arrived.  On a machine whose cores are shared
 * with other processes one thread that is not running then holds up all others for a time slice, in
 * every layer.  Here a call ends when every block is done: a thread that sleeps has taken no block,
 * and the others do its share.
 */
#ifndef DRAFTHOUSE_POOL_H
#define DRAFTHOUSE_POOL_H

typedef void (*block_function)(void *argument, long block);

/* How blocks are handed out.  NEIGHBOURS, for those that take the same time and read what lies in memory
 * as they are numbered: in a few runs, since two threads read these almost twice as fast as every
 * other block. */
enum Shares { ONE_BY_ONE, NEIGHBOURS };

/* Run function(argument, b) for every b < num_blocks on at most num_threads threads, the caller
 * among them; returns when all are done.  A second caller at the same time works alone. */
void run_blocks(block_function function, void *argument, long num_blocks, int num_threads, Shares shares = ONE_BY_ONE);

#endif
