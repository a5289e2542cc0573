"""How much of a shifted domain's loss a drafter gets back by learning from recorded traffic."""
