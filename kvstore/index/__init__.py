"""What a store node decides: places, states of slots, leases, claims, holds, quotas. No I/O."""
