import time,random,resource,json,os,psutil
from tests.fixtures.api import Api
def test_perf(api, tmp_path):
    with api.database.transaction() as c: c.execute("update accounts set balance=1000000000")
    rnd=random.Random(1)
    reqs=[{'prompt':''.join(rnd.choice('abcdefgh ') for _ in range(19)),'seed':i,'custom_id':f'r{i}'} for i in range(100000)]
    body=json.dumps({'model':'tiny','requests':reqs,'defaults':{'max_tokens':16,'temperature':0.7}}).encode()
    del reqs
    p=psutil.Process()
    for k in range(2):
        r0=p.memory_info().rss; c0=p.cpu_times(); t=time.time()
        a=api.client.post('/v1/jobs',content=body)
        c1=p.cpu_times()
        print(len(body),a.status_code,'wall',time.time()-t,'cpu',c1.user+c1.system-c0.user-c0.system,'rss',r0>>20,p.memory_info().rss>>20,'max',resource.getrusage(resource.RUSAGE_SELF).ru_maxrss>>10)
    j=a.json()['id']
    t=time.time()
    for _ in range(20): api.client.get(f'/v1/jobs/{j}')
    print('get ms',(time.time()-t)*50)
    t=time.time(); api.client.get(f'/v1/jobs/{j}/requests?status=errored'); print('filter ms',(time.time()-t)*1000)
    v=[random.random() for _ in range(4096//512)]
    body=json.dumps({'model':'tiny','requests':[{'prompt':'abc'*5,'seed':i} for i in range(10000)],'defaults':{'apply_steering_vectors':[{'activations':[v],'layer_indices':[1]}],'output_residual_stream':[1]}}).encode()
    t=time.time(); a=api.client.post('/v1/jobs',content=body); print('steered 10k',a.status_code,time.time()-t)
    import cProfile,pstats
    E=None
