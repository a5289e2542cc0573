from cluster.requests.fields import DEFAULT_TENANT, tenant_of


def test_equal_salts_are_one_tenant_and_no_salt_is_another():
    assert tenant_of("a") == tenant_of("a")
    assert len({tenant_of("a"), tenant_of("b"), tenant_of(None)}) == 3
    assert tenant_of(None) == tenant_of("") == DEFAULT_TENANT


def test_a_salt_cannot_be_read_from_its_tenant():
    for salt in ("a", "a longer salt that nobody should see"):
        assert salt.encode() not in tenant_of(salt)
        assert len(tenant_of(salt)) == 16
